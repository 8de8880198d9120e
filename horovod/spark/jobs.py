"""Run jobs on Spark tasks: with a fixed number of ranks, and elastic ones. `runner` calls these.

For the elastic driver every attempt of a task is a host of its own: it comes when the task
connects, and goes when the connection ends. Spark restarts tasks that failed, and starts tasks that
found no room when new executors come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.common.config import Config
from horovod.runner.api import (
    AgentSet,
    Driver,
    FixedRanks,
    HostAgent,
    HostDiscovery,
    HostManager,
    JobRequest,
    Limits,
    NoMoreHosts,
    Outcome,
    Status,
    WorkerRequest,
    collect_results,
    failures,
    raise_outcome,
)
from horovod.spark.gathering import assign_ranks, check_slots, check_versions, gather, spark_error
from horovod.spark.job_setup import JobSetup
from horovod.spark.spark_job import SparkJob
from horovod.spark.task_link import TaskLink, TaskServer


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
    links_by_name = {link.name: link for link in links}
    with setup.open_watcher() as watcher, setup.open_job(watcher) as job:
        request = JobRequest(
            command=setup.command,
            slots=[slot for _, slot in ranks],
            env=watcher.variables(),
            cwd=".",
            nics=setup.nics,
            start_timeout=setup.ticket.start_timeout,
            verbose=setup.verbose,
            agent_names=[link.name for link, _ in ranks],
        )
        for _, slot in ranks:
            job.outputs.open(slot.rank, slot.rank)
        hosts = AgentSet(
            request, job, lambda name: HostAgent(name, link=links_by_name[name]), together=True
        )
        outcome = job.run(hosts, FixedRanks(request, job, hosts))
        watcher.ended(outcome)
    return outcome


def run_elastic_tasks(setup: JobSetup, limits: Limits) -> list[Any]:
    """Return what the first ``min_np`` ranks returned, or raise what went wrong."""
    assert limits.max_np is not None
    check_slots(setup.cluster, limits.num_proc)
    with setup.open_tasks(limits.max_np, barrier=False) as (server, spark_job):
        gather(server, spark_job, setup.cluster, limits.num_proc, setup.ticket.start_timeout)
        check_versions([link.info for link in server.living()], setup.ticket.version)
        outcome = _drive(setup, server, spark_job, limits)
        raise_outcome(failures(setup.store), outcome)
        results = collect_results(setup.store, limits.min_np)
        if len(server.partitions()) < limits.max_np:
            spark_job.cancel()  # otherwise tasks that wait for room would still start
    return results


def _drive(setup: JobSetup, server: TaskServer, spark_job: SparkJob, limits: Limits) -> Outcome:
    discovery = TaskDiscovery(server, spark_job)
    with (
        setup.open_watcher(elastic=True) as watcher,
        Status(setup.console, watcher=watcher) as status,
        setup.open_job(watcher) as job,
    ):

        def connect(name: str) -> HostAgent:
            link = discovery.link(name)
            check_versions([link.info], setup.ticket.version)
            link.restarts = lambda: not job.is_ending
            return HostAgent(name, link=link)

        request = WorkerRequest(
            command=setup.command,
            env=watcher.variables(),
            cwd=".",
            nics=setup.nics,
            start_timeout=limits.start_timeout,
            verbose=setup.verbose,
        )
        hosts = AgentSet(request, job, connect)
        driver = Driver(job, hosts, limits, HostManager(discovery), status, request.verbose)
        outcome = job.run(hosts, driver)
        if outcome.account:
            outcome.account = f"{outcome.problem}\n{outcome.account}"
        watcher.ended(outcome)
    return outcome


class TaskDiscovery(HostDiscovery):
    """The tasks that are connected, each a host with one slot."""

    def __init__(self, server: TaskServer, job: SparkJob) -> None:
        self._server = server
        self._job = job

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        if not self._job.is_running:
            raise NoMoreHosts(str(spark_error(self._job)))
        return {link.elastic_host: 1 for link in self._server.living()}

    def link(self, name: str) -> TaskLink:
        for link in self._server.living():
            if link.elastic_host == name:
                return link
        raise ConnectionResetError("its Spark task has ended")


def limits_from(
    num_proc: int,
    min_num_proc: int | None,
    max_num_proc: int | None,
    reset_limit: int | None,
    elastic_timeout: float | None,
) -> Limits:
    """Make the limits of the job; `ValueError` if they contradict each other."""
    least = num_proc if min_num_proc is None else min_num_proc
    most = num_proc if max_num_proc is None else max_num_proc
    if not 1 <= least <= num_proc <= most:
        raise ValueError(
            f"it must be 1 <= min_num_proc <= num_proc <= max_num_proc, but these are {least}, "
            f"{num_proc} and {most}"
        )
    if reset_limit is not None and reset_limit < 0:
        raise ValueError(f"reset_limit must not be negative, but is {reset_limit}")
    if elastic_timeout is not None and elastic_timeout <= 0:
        raise ValueError(f"elastic_timeout must be more than 0 seconds, not {elastic_timeout!r}")
    config = Config.from_env()
    return Limits(
        num_proc=num_proc,
        min_np=least,
        max_np=most,
        reset_limit=reset_limit,
        elastic_timeout=config.elastic_timeout if elastic_timeout is None else elastic_timeout,
        start_timeout=config.start_timeout,
        answer_timeout=config.elastic_answer_timeout,
    )
