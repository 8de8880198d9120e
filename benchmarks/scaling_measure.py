"""The measurements behind benchmarks/scaling_model.py: starts ranks, gives orders, sums up."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks.processes import ROOT, Group, group, limit, torchrun_environments
from benchmarks.scaling_costs import Layout, Machine

NETWORK = {"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}
PING_PONGS = 500
STREAM = 32 << 20
LOCAL = 16 << 20
STORE_REQUESTS = 100
STORE_VALUE = 64 << 10
WARM_UP = 5
CALLS = (5, 200)  # of an allreduce: at least, at most
STEPS = (12, 100)  # of a training run


@dataclass(frozen=True)
class Training:
    """One measured training run: seconds per step, and the bytes of the model's tensors."""

    model: str
    layout: Layout
    plain: float
    ours: float
    sizes: list[int]


def environments(layout: Layout, knobs: dict[str, str]) -> list[dict[str, str]]:
    """Of ranks that believe to be on several hosts; in fact all are here."""
    found = []
    for rank, environ in enumerate(torchrun_environments(layout.size)):
        host, local = divmod(rank, layout.per_host)
        environ.update(
            HOROVOD_HOSTNAME=f"host{host}",
            LOCAL_RANK=str(local),
            LOCAL_WORLD_SIZE=str(layout.per_host),
        )
        found.append(environ | knobs)
    return found


@contextmanager
def ranks(layout: Layout, timeout: float, **knobs: str) -> Iterator[Group]:
    """A job that waits for orders."""
    program = [sys.executable, str(ROOT / "benchmarks" / "scaling_rank.py")]
    with tempfile.TemporaryDirectory(prefix="horovod-benchmark-") as folder, limit(timeout):
        output = Path(folder, f"{layout.size} ranks on {layout.hosts} hosts")
        commands = [(program, environ) for environ in environments(layout, knobs)]
        with group(commands, output) as job:
            yield job


def machine(timeout: float) -> Machine:
    """The constants of this one."""
    with ranks(Layout(1, 1), timeout) as job:
        ((add_byte, copy_byte),) = job.ask(["memory", LOCAL])
        ((store_request, store_byte),) = job.ask(["store", STORE_REQUESTS, STORE_VALUE])
    with ranks(Layout(1, 2), timeout) as job:
        (port,) = job.ask(["listen"], ranks=1)
        trips = job.ask(["ping_pong", port, PING_PONGS])
        (port,) = job.ask(["listen"], ranks=1)
        streams = job.ask(["stream", port, STREAM])
        call, large = (
            fmean(job.ask(["allreduce_work", nbytes, count]))
            for nbytes, count in ((4, 200), (LOCAL, 10))
        )
    message = sum(cpu for _, cpu in trips) / 2
    return Machine(
        call=call,
        message=message,
        wake=max(0.0, sum(wall for wall, _ in trips) / 4 - message),
        send_byte=streams[0][1],
        receive_byte=streams[1][1],
        add_byte=add_byte,
        copy_byte=copy_byte,
        shared_byte=max(0.0, large - call) / LOCAL,
        store_request=store_request,
        store_byte=store_byte,
        cores=len(os.sched_getaffinity(0)),
    )


def slowest(job: Group, nbytes: int, count: int) -> list[float]:
    """Seconds of allreduces, each as long as on its slowest rank."""
    job.ask(["allreduce", nbytes, WARM_UP])
    calls = zip(*job.ask(["allreduce", nbytes, count]), strict=True)
    return [max(call) for call in calls]


def allreduces(size: int, sizes: list[int], seconds: float, timeout: float) -> dict[int, float]:
    """Seconds of an allreduce of each size between `size` ranks that use the network only."""
    found = {}
    with ranks(Layout(size, 1), timeout, **NETWORK) as job:
        for nbytes in sizes:
            rough = max(max(each) for each in job.ask(["allreduce", nbytes, 3]))
            fewest, most = CALLS
            count = _within(seconds / rough, fewest, most)
            found[nbytes] = median(slowest(job, nbytes, count))
    return found


def training(model: str, layout: Layout, seconds: float, timeout: float) -> Training:
    """Steps without and with communication, in turns, between hosts that are all here."""
    with ranks(layout, timeout) as job:
        rough = max(max(each["ours"] + each["plain"]) for each in job.ask(["train", model, 4]))
        steps = _within(seconds / rough / 2, *STEPS)
        found = job.ask(["train", model, steps])
    times = {
        name: median(max(each) for each in zip(*(f[name] for f in found), strict=True))
        for name in ("plain", "ours")
    }
    return Training(model, layout, times["plain"], times["ours"], found[0]["sizes"])


def _within(number: float, fewest: int, most: int) -> int:
    return max(fewest, min(most, int(number)))
