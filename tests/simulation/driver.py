"""The launcher of a simulated elastic job: `run_job`, without its options."""

from __future__ import annotations

import os
from typing import Any

import simulated  # what the simulation offers

from horovod.runner.agents.agent_set import AgentSet, WorkerRequest
from horovod.runner.agents.controller import JobController
from horovod.runner.elastic.discovery import HostDiscovery, HostManager
from horovod.runner.elastic.driver import Driver
from horovod.runner.elastic.job_state import Limits
from horovod.runner.output.console import Console
from horovod.runner.output.report import exit_status
from horovod.runner.output.watcher import JobWatcher, Status


class Discovery(HostDiscovery):
    """The hosts that the simulation offers."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return simulated.discover()


class Events(JobWatcher):
    """The events of the job, which are part of the story."""

    def note(self, event: str, **details: Any) -> None:
        simulated.take_event(event, details)


def main() -> None:
    """Run the job to its end."""
    plan = simulated.plan
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        console = Console(nowhere, nowhere)
        request = WorkerRequest(
            command=["", "-m", "tests.simulation.worker"],
            env={
                "HOROVOD_CPU_OPERATIONS": "gloo",  # TCP also inside of hosts
                "HOROVOD_KEEP_HEAP": "0",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(plan.stall_shutdown),
            },
            cwd="/",
        )
        limits = Limits(
            num_proc=plan.num_proc,
            min_np=plan.min_np,
            max_np=plan.max_np,
            elastic_timeout=plan.elastic_timeout,
        )
        manager = HostManager(Discovery(), max_failures=1000)
        status = Status(console, watcher=Events())
        with JobController(console) as job:
            hosts = AgentSet(request, job)
            outcome = job.run(hosts, Driver(job, hosts, limits, manager, status))
        simulated.ended(exit_status(outcome), outcome.problem)
    finally:
        os.close(nowhere)
