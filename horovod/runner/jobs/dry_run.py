"""Describe in words what a job would start, where and how: ``horovodrun --dry-run``.

`launch` prints it. Nothing is started and no host is contacted; only the addresses of other hosts
are looked up by their names.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from horovod.common.addresses import LOOPBACK
from horovod.common.topology import Slot
from horovod.runner.agents.host_agent import start_command
from horovod.runner.agents.host_facts import usable_cores
from horovod.runner.agents.store_endpoints import addresses_towards
from horovod.runner.jobs.request import JobRequest
from horovod.runner.output.report import format_ranks
from horovod.runner.slots.allocation import Allocation
from horovod.runner.slots.hosts import is_local
from horovod.runner.slots.worker_env import (
    HOST_VARIABLES,
    KEY,
    interface_variables,
    memory_variables,
    slot_variables,
    threads_per_worker,
    travelling_variables,
)

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
        "ranks": _ranks(request.slots),
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


def _ranks(slots: Sequence[Slot]) -> list[str]:
    return [
        f"rank {slot.rank} of {slot.size}: {slot.hostname}, local {slot.local_rank} of "
        f"{slot.local_size}, cross {slot.cross_rank} of {slot.cross_size}"
        for slot in slots
    ]


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
        "OMP_NUM_THREADS": request.env.get("OMP_NUM_THREADS") or _threads(request),
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


def _threads(request: JobRequest) -> str:
    shares = [
        f"{threads_per_worker(usable_cores(), len(slots))} on {name}"
        if is_local(name)
        else f"cores / {len(slots)} on {name}"
        for name, slots in request.hosts.items()
    ]
    return shares[0].partition(" on ")[0] if request.all_local else ", ".join(shares)
