"""Starting jobs: the ``horovodrun`` command.

launch -> arguments, hosts, worker_env (what to start) -> workers (start it, through the guard
process) -> supervise (output, failures, signals) -> report (what went wrong first).
"""
