"""Agents: the process on each host that starts and ends workers, and the launcher's side of it.

These modules run on the host, with the standard library alone: `agent` with `agent_streams`,
`bootstrap` and `local_host`; `probe` and `stack` follow when they are needed, and `host_inspection`
is the program of ``horovodrun --check``.

These run in the launcher: `controller` (runs a job on a set of hosts, as a policy says),
`agent_set` (the hosts of most jobs, with an agent on each), `host_agent` (one host), `starters`
(the line to an agent, and the command that starts it on another host), `supervise` (the loop over
all agents), `store_endpoints` (the addresses at which hosts reach the job's store), `channel` and
`link_server` (for hosts that connect by themselves).
"""
