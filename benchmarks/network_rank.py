"""One rank of the sections of benchmarks/network.py that do not train: start, and call when told.

Started by `benchmarks.network` with a plan in JSON as the only argument. Every order is a dict
whose "do" names what is wanted.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.buffers import rotating, verify
from benchmarks.processes import Member, bind

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
AWAKE = 0.0003  # seconds before a start in which a rank that has a core stays awake
WARM_UP = 3


class Library:
    """A contender: how it is loaded and started, and its in-place float32 sum."""

    def load(self) -> None: ...

    def start(self) -> None:
        """Until all ranks have met."""
        dist.init_process_group("gloo", rank=RANK, world_size=SIZE)
        dist.barrier()

    def allreduce(self, buffer: torch.Tensor) -> None:
        dist.all_reduce(buffer)

    def stop(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class Ours(Library):
    def load(self) -> None:
        import horovod.torch as hvd

        self.hvd = hvd

    def start(self) -> None:
        self.hvd.init()

    def allreduce(self, buffer: torch.Tensor) -> None:
        self.hvd.allreduce_(buffer, op=self.hvd.Sum, name="benchmark")

    def stop(self) -> None:
        self.hvd.shutdown()


class Rank:
    """Carries out orders."""

    def __init__(self, contender: str, crowded: bool) -> None:
        self.contender = contender
        self.library = Ours() if contender == "ours" else Library()
        self.awake = 0.0 if crowded else AWAKE  # spinning would keep others from their start
        self.buffers: list[torch.Tensor] = []
        self.calls = 0

    def carry_out(self, order: dict[str, Any]) -> Any:
        return getattr(self, order.pop("do"))(**order)

    def load(self, start: float) -> float:
        return self._timed(self.library.load, start)

    def start(self, start: float) -> float:
        return self._timed(self.library.start, start)

    def prepare(self, nbytes: int) -> None:
        """Buffers of that size; the sum is right, and the calls that follow are not the first."""
        self.buffers = []  # the old ones first: there may be no room for both
        self.buffers = rotating(nbytes)
        for _ in range(WARM_UP):
            verify(self.contender, self.library.allreduce, self.buffers[0], RANK, SIZE)
        gc.collect()
        gc.disable()

    def call(self, start: float, every: float, calls: int) -> list[float]:
        """The moments at which the calls ended; each begins at its own, or after the last."""
        ends = []
        for number in range(calls):
            buffer = self.buffers[self.calls % len(self.buffers)]
            self.calls += 1
            self._wait(start + number * every)
            self.library.allreduce(buffer)
            ends.append(time.monotonic())
        return ends

    def _timed(self, function: Callable[[], None], start: float) -> float:
        """Milliseconds from the common start to the end."""
        self._wait(start)
        function()
        return 1000 * (time.monotonic() - start)

    def _wait(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.awake - time.monotonic()))
        while time.monotonic() < moment:
            pass


def main(plan: dict[str, Any]) -> None:
    member = Member()
    if plan["bind"]:
        bind(RANK)
    rank = Rank(plan["contender"], plan["crowded"])
    member.obey(rank.carry_out)
    rank.library.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
