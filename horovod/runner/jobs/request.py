"""Describe a job with fixed ranks: what to run, where, and what the workers of each host get.

`make_request` makes a `JobRequest` from the options, for `run_job`, `controllers` and `host_check`;
`make_worker_request` makes the part that elastic jobs have too. The launcher for Spark makes its
own. `worker_specs` derives from it what an agent needs to start the workers of its host.
`describe_plan` says in words what a job would start, where and how, for ``horovodrun --dry-run``:
it starts nothing and contacts no host, and only looks up addresses.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.joining.addresses import LOOPBACK
from horovod.common.topology import Slot
from horovod.observe.reports.amounts import count_of
from horovod.runner.agents.agent_set import WorkerRequest
from horovod.runner.agents.host_agent import HostAgent, WorkerSpec, start_command
from horovod.runner.agents.local_host import usable_cores
from horovod.runner.agents.starters import make_starter
from horovod.runner.agents.store_endpoints import addresses_towards
from horovod.runner.options.tunables import settings, settings_environment
from horovod.runner.output.report import LaunchError, format_ranks
from horovod.runner.slots.allocation import Allocation
from horovod.runner.slots.hosts import is_local, plan_slots
from horovod.runner.slots.worker_env import (
    CROWDED_ADVICE,
    HOST_VARIABLES,
    KEY,
    interface_variables,
    memory_variables,
    slot_variables,
    threads_per_worker,
    travelling_variables,
)


@dataclass(frozen=True)
class JobRequest(WorkerRequest):
    """Describes what a job with fixed ranks runs, where and how."""

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


def make_worker_request(
    options: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]
) -> WorkerRequest:
    """Return what the workers of any job run, and how they are started; see `make_request`."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the folder in which this program runs is not there any more, and the workers are to "
            "run in it: change to one that exists"
        ) from None
    timeout = settings(options, env).start_timeout
    return WorkerRequest(
        command=command,
        env={**env, **settings_environment(options, env)},
        cwd=cwd,
        starter=make_starter(options, env, timeout),
        nics=options.network_interfaces or (),
        start_timeout=timeout,
        cpu_bind=options.cpu_bind,
        verbose=options.verbose,
    )


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
    workers = make_worker_request(options, command, env)
    return JobRequest(**vars(workers), slots=slots, attach=options.attach)


def worker_specs(request: JobRequest, agent: HostAgent) -> list[WorkerSpec]:
    """Return the workers that an agent has to start."""
    peers = neighbours(request, agent.name)
    return [
        WorkerSpec(
            slot.rank,
            request.command,
            slot_variables(slot),
            request.cwd,
            request.cpu_share(peers.index(slot), len(peers)),
            slot.rank == request.attach,
        )
        for slot in request.hosts[agent.name]
    ]


def describe_threads(request: JobRequest, agents: Iterable[HostAgent]) -> list[str]:
    """Return sentences on how many threads the workers get, one for all hosts that are alike.

    Without --verbose there are only those about hosts with more workers than cores: these are slow.
    """
    chosen = request.env.get("OMP_NUM_THREADS")
    alike: dict[tuple[int, int], list[str]] = {}
    for agent in agents:
        if agent.link.own_variables is None:
            continue  # the cluster that offers the host decides on threads
        facts = (agent.cores, len(neighbours(request, agent.name)))
        alike.setdefault(facts, []).append(agent.name)
    sentences = []
    for (cores, workers), names in alike.items():
        threads = threads_per_worker(cores, workers)
        where = "" if len(alike) == 1 else f" on {', '.join(names)}"
        if workers > cores:
            many = count_of(cores, "core")
            each = f", with OMP_NUM_THREADS={chosen or threads} for each"
            sentences.append(f"{workers} ranks share {many}{where}{each}. {CROWDED_ADVICE}")
        elif request.verbose and not chosen:
            sentences.append(
                f"OMP_NUM_THREADS={threads} for each worker{where} ({cores} cores, "
                f"{count_of(workers, 'worker')}); set it yourself to choose otherwise"
            )
    return sentences


def neighbours(request: JobRequest, name: str) -> list[Slot]:
    """Return all slots on a host's machine; this machine may be in the list under several names."""
    if not is_local(name):
        return request.hosts[name]
    return [slot for slot in request.slots if is_local(slot.hostname)]


_AT_START = "(chosen when the job starts)"


def describe_plan(request: JobRequest, allocation: Allocation | None = None) -> str:
    """Return the whole plan for people.

    Args:
        request: The job.
        allocation: The batch job that the hosts belong to, if no option names them.
    """
    sections = {
        "command": [shlex.join(request.command), f"in {request.cwd}"],
        f"hosts ({allocation})" if allocation else "hosts": _hosts(request),
        "ranks": [
            f"rank {slot.rank} of {slot.size}: {slot.hostname}, local {slot.local_rank} of "
            f"{slot.local_size}, cross {slot.cross_rank} of {slot.cross_size}"
            for slot in request.slots
        ],
        "addresses": _addresses(request),
        "environment of all workers": _environment(request),
        "environment of each rank": [
            f"rank {slot.rank}: "
            + " ".join(f"{name}={value}" for name, value in slot_variables(slot).items())
            for slot in request.slots
        ],
        "agents (one on each host; it gets the command and the environment through a pipe)": [
            f"{name}: {shlex.join(start_command(name, request.starter))}" for name in request.hosts
        ],
    }
    lines = []
    for title, content in sections.items():
        lines += [f"{title}:", *(f"  {line}" for line in content), ""]
    return "\n".join([*lines, "Nothing was started."])


def _hosts(request: JobRequest) -> list[str]:
    found = []
    for name, slots in request.hosts.items():
        how = "this machine" if is_local(name) else f"through {request.starter.name}"
        which = format_ranks([slot.rank for slot in slots])
        found.append(f"{name} ({how}): rank{'s' if len(slots) > 1 else ''} {which}")
    return found


def _addresses(request: JobRequest) -> list[str]:
    if request.all_local:
        return [f"the ranks meet at {LOOPBACK}, which only this machine reaches"]
    found = []
    for name in request.hosts:
        if not is_local(name):
            ways = addresses_towards(name, ("", ""), request.nics)
            known = ", ".join(ways) or "an address to be found when its agent has started"
            found.append(f"{name} reaches this machine, where the ranks meet, at {known}")
    return [*found, "every host tries its way when the job starts, and the job ends if none leads"]


def _environment(request: JobRequest) -> list[str]:
    address = LOOPBACK if request.all_local else _AT_START
    known = {name: value for name, value in request.env.items() if name.startswith("HOROVOD_")}
    known |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": _AT_START,
        "MASTER_ADDR": address,
        "MASTER_PORT": _AT_START,
        KEY: "(a fresh secret)",
        "OMP_NUM_THREADS": request.env.get("OMP_NUM_THREADS") or _describe_threads(request),
        "PYTHONUNBUFFERED": "1",
        **memory_variables(os.uname().machine, request.env),
        **interface_variables(list(request.nics)),
    }
    lines = [f"{name}={value}" for name, value in sorted(known.items())]
    others = sorted(set(request.env) - set(known))
    lines.append(f"and as they are here: {', '.join(others)}")
    if not request.all_local:
        behind = set(request.env) - set(travelling_variables(request.env)) - set(HOST_VARIABLES)
        lines.append(f"on other hosts without: {', '.join(sorted(behind)) or 'none'}")
        lines.append(f"on other hosts as they are there: {', '.join(HOST_VARIABLES)}")
    return lines


def _describe_threads(request: JobRequest) -> str:
    shares = [
        f"{threads_per_worker(usable_cores(), len(slots))} on {name}"
        if is_local(name)
        else f"cores / {len(slots)} on {name}"
        for name, slots in request.hosts.items()
    ]
    return shares[0].partition(" on ")[0] if request.all_local else ", ".join(shares)
