"""Run a job with a fixed number of ranks on Spark tasks. `runner.run` calls `run_static`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.runner.api import (
    AgentSet,
    FixedRanks,
    HostAgent,
    JobRequest,
    Outcome,
    collect_results,
    failures,
    raise_outcome,
)
from horovod.spark.gathering import assign_ranks, check_slots, check_versions, gather
from horovod.spark.job_setup import JobSetup
from horovod.spark.task_link import TaskLink


def run_static(setup: JobSetup, num_proc: int) -> list[Any]:
    """Return the results by rank, or raise the failure; nothing is left running."""
    cluster, ticket = setup.cluster, setup.ticket
    check_slots(cluster, num_proc)
    # Barrier tasks start all at once or not at all: two jobs cannot each hold half the slots.
    barrier = cluster.allows_barrier and (cluster.slots or 0) >= num_proc
    with setup.open_tasks(num_proc, barrier=barrier) as (server, spark_job):
        links = gather(server, spark_job, cluster, num_proc, ticket.start_timeout)
        check_versions([link.info for link in links], ticket.version)
        outcome = _run_workers(setup, links)
        if outcome.lost is not None and spark_job.why():
            outcome.account += f"\nSpark says:\n{spark_job.why()}\n"
        raise_outcome(failures(setup.store), outcome)
        return collect_results(setup.store, num_proc)


def _run_workers(setup: JobSetup, links: Sequence[TaskLink]) -> Outcome:
    ranks = assign_ranks(links)
    links_by_name = {each.name: each.link for each in ranks}
    with setup.open_watcher() as watcher, setup.open_job(watcher) as job:
        request = JobRequest(
            command=setup.command,
            slots=[each.slot for each in ranks],
            env=watcher.variables(),
            cwd=".",
            nics=setup.nics,
            start_timeout=setup.ticket.start_timeout,
            verbose=setup.verbose,
            agent_names=[each.name for each in ranks],
        )
        for each in ranks:
            job.outputs.open(each.slot.rank, each.slot.rank)
        hosts = AgentSet(
            request, job, lambda name: HostAgent(name, link=links_by_name[name]), together=True
        )
        outcome = job.run(hosts, FixedRanks(request, job, hosts))
        watcher.ended(outcome)
    return outcome
