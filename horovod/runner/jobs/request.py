"""Describe a job with fixed ranks: what to run, where, and what the workers of each host get.

`make_request` makes a `JobRequest` from the options, for `run_job`, `controllers`, `dry_run` and
`host_check`. The launcher for Spark makes its own. `worker_specs` derives from it what an agent
needs to start the workers of its host.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.topology import Slot
from horovod.runner.agents.agent_set import WorkerRequest
from horovod.runner.agents.host_agent import HostAgent, WorkerSpec
from horovod.runner.agents.starters import make_starter
from horovod.runner.options.tunables import settings, settings_environment
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import is_local, plan_slots
from horovod.runner.slots.worker_env import (
    CROWDED_ADVICE,
    slot_variables,
    threads_per_worker,
)


@dataclass(frozen=True)
class JobRequest(WorkerRequest):
    """What a job with fixed ranks runs, where and how."""

    slots: Sequence[Slot] = ()
    attach: int | None = None  # the rank that gets the launcher's stdin
    agent_names: Sequence[str] = ()  # by rank, if a host has several agents

    @functools.cached_property
    def hosts(self) -> dict[str, list[Slot]]:
        """The slots of every agent, in the order of ranks; nearly always one agent per host."""
        slots: dict[str, list[Slot]] = {}
        names = self.agent_names or [slot.hostname for slot in self.slots]
        for slot, name in zip(self.slots, names, strict=True):
            slots.setdefault(name, []).append(slot)
        return slots

    @property
    def all_local(self) -> bool:
        return all(is_local(name) for name in self.hosts)


def make_request(
    options: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]
) -> JobRequest:
    """Make the request that the options describe.

    Args:
        options: The options of horovodrun.
        command: The program that each rank runs, with its arguments.
        env: The launcher's environment.

    Raises:
        LaunchError: If the hosts have too few slots.
    """
    try:
        slots = plan_slots(options.hosts, options.num_proc)
    except ValueError as error:
        raise LaunchError(str(error), status=2) from None
    timeout = settings(options, env).start_timeout
    return JobRequest(
        command=command,
        slots=slots,
        env={**env, **settings_environment(options, env)},
        cwd=os.getcwd(),
        starter=make_starter(options, env, timeout),
        nics=options.network_interfaces or (),
        start_timeout=timeout,
        cpu_bind=options.cpu_bind,
        verbose=options.verbose,
        attach=options.attach,
    )


def worker_specs(request: JobRequest, agent: HostAgent) -> list[WorkerSpec]:
    """Return the workers that an agent has to start."""
    peers = neighbours(request, agent.name)
    return [
        WorkerSpec(
            slot.rank,
            request.command,
            slot_variables(slot),
            request.cwd,
            None
            if request.cpu_bind == "none"
            else (request.cpu_bind, peers.index(slot), len(peers)),
            slot.rank == request.attach,
        )
        for slot in request.hosts[agent.name]
    ]


def describe_threads(request: JobRequest, agents: Iterable[HostAgent]) -> list[str]:
    """Return sentences on how many threads the workers get, one for all hosts that are alike.

    Without --verbose there are only those about hosts with more workers than cores: these are slow.
    """
    chosen = request.env.get("OMP_NUM_THREADS")
    alike: dict[tuple[int, int, int], list[str]] = {}
    for agent in agents:
        if agent.link.own_variables is None:
            continue  # the cluster that offers the host decides on threads
        facts = (_threads(request, agent), _cores(agent), len(neighbours(request, agent.name)))
        alike.setdefault(facts, []).append(agent.name)
    sentences = []
    for (threads, cores, workers), names in alike.items():
        where = "" if len(alike) == 1 else f" on {', '.join(names)}"
        if workers > cores:
            many = "1 core" if cores == 1 else f"{cores} cores"
            each = f", with OMP_NUM_THREADS={chosen or threads} for each"
            sentences.append(f"{workers} ranks share {many}{where}{each}. {CROWDED_ADVICE}")
        elif request.verbose and not chosen:
            plural = "" if workers == 1 else "s"
            sentences.append(
                f"OMP_NUM_THREADS={threads} for each worker{where} ({cores} cores, {workers} "
                f"worker{plural}); set it yourself to choose otherwise"
            )
    return sentences


def _threads(request: JobRequest, agent: HostAgent) -> int:
    return threads_per_worker(_cores(agent), len(neighbours(request, agent.name)))


def _cores(agent: HostAgent) -> int:
    return int((agent.hello or {})["cores"])


def neighbours(request: JobRequest, name: str) -> list[Slot]:
    """Return all slots on a host's machine; this machine may be in the list under several names."""
    if not is_local(name):
        return request.hosts[name]
    return [slot for slot in request.slots if is_local(slot.hostname)]
