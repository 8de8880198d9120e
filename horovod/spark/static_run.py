"""A job with a fixed number of ranks on Spark tasks. `runner.run` calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from horovod.common.store import MemoryStore
from horovod.runner.console import Console
from horovod.runner.meeting import MeetingPlace
from horovod.runner.outputs import Outputs
from horovod.runner.report import LaunchError, Outcome, describe_failure
from horovod.runner.run_function import collect_results, raise_failures
from horovod.runner.ssh import Ssh
from horovod.runner.static_job import JobRequest, StaticJob
from horovod.runner.supervise import Supervisor
from horovod.spark.cluster import Cluster
from horovod.spark.gathering import assign_ranks, check_slots, check_versions, gather
from horovod.spark.spark_job import SparkJob
from horovod.spark.task_link import TaskLink
from horovod.spark.task_server import TaskServer
from horovod.spark.ticket import Ticket


class StaticRun:
    """One call of ``horovod.spark.run``."""

    def __init__(
        self,
        cluster: Cluster,
        ticket: Ticket,
        bind: str,
        store: MemoryStore,
        console: Console,
        verbose: bool,
        nics: Sequence[str],
    ) -> None:
        self._cluster = cluster
        self._ticket = ticket
        self._bind = bind
        self._store = store
        self._console = console
        self._verbose = verbose
        self._nics = nics

    def run(self, num_proc: int) -> list[Any]:
        """What each rank returned; raises what went wrong, with nothing left running."""
        check_slots(self._cluster, num_proc)
        server = TaskServer(self._bind, self._ticket.key)
        job: SparkJob | None = None
        try:
            ticket = dataclasses.replace(self._ticket, port=server.port)
            job = SparkJob(
                self._cluster.context,
                ticket,
                num_proc,
                barrier=self._cluster.allows_barrier and self._cluster.slots >= num_proc,
                ended=server.wake,
            )
            links = gather(server, job, self._cluster, num_proc, ticket.start_timeout)
            check_versions([link.info for link in links], ticket.version)
            self._raise(self._run_workers(links), job)
            results = collect_results(self._store, num_proc)
        except BaseException:
            if job is not None:
                job.cancel()
            raise
        finally:
            server.close()
        job.wait()
        return results

    def _run_workers(self, links: Sequence[TaskLink]) -> Outcome:
        ranks = assign_ranks(links)
        request = JobRequest(
            command=[self._ticket.executable or "", "-m", "horovod.runner.run_task"],
            slots=[each.slot for each in ranks],
            env={},
            cwd=".",
            ssh=Ssh(),
            nics=self._nics,
            start_timeout=self._ticket.start_timeout,
            verbose=self._verbose,
            agent_names=[each.name for each in ranks],
        )
        outputs = Outputs(self._console)
        for each in ranks:
            outputs.open(each.slot.rank, each.slot.rank, {})
        place = MeetingPlace(self._ticket.key, self._store)
        supervisor = Supervisor(self._console, outputs)
        try:
            agents = [each.link.start_agent(each.name) for each in ranks]
            outcome = StaticJob(request, place, supervisor, agents).run()
        finally:
            supervisor.close()
            place.close()
        first = outcome.first_failure
        tail = [] if first is None else outputs.tail(first.rank)
        outcome.account = describe_failure(outcome, tail)
        return outcome

    def _raise(self, outcome: Outcome, job: SparkJob) -> None:
        if outcome.lost is not None and job.why():
            outcome.account += f"\nSpark says:\n{job.why()}\n"
        try:
            raise_failures(self._store, outcome)
        except LaunchError as error:
            raise RuntimeError(str(error)) from None
