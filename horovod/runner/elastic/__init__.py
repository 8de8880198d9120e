"""Elastic jobs: ``horovodrun`` with --min-np or --host-discovery-script.

job (what `run_job` calls) -> driver (executes) -> policy (what to do, pure) with termination (when
it is the end) and blacklist. job_state is all that the driver knows. discovery and polling say
which hosts there are, agents start workers there (`host_set` is what the driver asks of them),
decision_log tells workers what was decided, liveness minds their answers, failures who fails,
status tells people and files what happens. The workers' side is `horovod.common.membership`;
`horovod.common.decisions` is what both say.
"""
