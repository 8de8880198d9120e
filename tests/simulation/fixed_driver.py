"""The launcher of a simulated job with fixed ranks: `run_job`, without its options."""

from __future__ import annotations

import os

import simulated  # what the simulation offers

from horovod.runner.agents.agent_set import AgentSet
from horovod.runner.agents.controller import JobController
from horovod.runner.jobs.fixed_ranks import FixedRanks
from horovod.runner.jobs.request import JobRequest
from horovod.runner.output.console import Console
from horovod.runner.output.outputs import Outputs
from horovod.runner.output.report import LaunchError, exit_status, format_ranks
from horovod.runner.slots.hosts import Host, plan_slots
from tests.simulation.driver import Events


def main() -> None:
    """Run the job to its end."""
    plan = simulated.plan
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        console = Console(nowhere, nowhere)
        request = JobRequest(
            command=["", "-m", "tests.simulation.fixed_worker"],
            slots=plan_slots([Host(name, plan.slots) for name in plan.host_names], plan.num_proc),
            env={
                "HOROVOD_CPU_OPERATIONS": "gloo",  # TCP also inside of hosts
                "HOROVOD_KEEP_HEAP": "0",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(plan.stall_shutdown),
            },
            cwd="/",
        )
        outputs = Outputs(console)
        with JobController(console, outputs, watcher=Events(), pass_interrupts_on=True) as job:
            for slot in request.slots:
                outputs.open(slot.rank, slot.rank)
            hosts = AgentSet(request, job, together=True)
            outcome = job.run(hosts, FixedRanks(request, job, hosts))
    except LaunchError as error:
        simulated.ended(error.status, str(error))
    else:
        failures = outcome.early_exits or [outcome.first_failure]
        ranks = [one.rank for one in failures if one is not None]
        rows = [f"  {rank} " for rank in ranks]
        if not ranks and outcome.lost is not None:
            ranks = list(outcome.lost.ranks)
            rows = [f"  {format_ranks(ranks)} "]
        simulated.blames(ranks, [row for row in rows if row not in outcome.account])
        simulated.ended(exit_status(outcome), outcome.problem)
    finally:
        os.close(nowhere)
