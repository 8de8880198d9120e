"""Hosts: the agent that starts and ends the workers of one, and the launcher's side of it.

On the host, with the standard library alone: agent with agent_input, agent_output, bootstrap,
cores, frames, host_facts, probe and processes. In the launcher: host_agent and agent_link, starter
(how an agent comes to a host) with ssh and srun, supervise (the loop over all agents),
store_endpoints (where the hosts reach the job's store). Both kinds of job, and the launchers for
Spark and Ray, use it.
"""
