"""One rank of benchmarks/collectives.py: times Horovod and a rival in this process.

Started by `benchmarks.collectives`, under mpirun if the rival is Open MPI, with a plan in JSON as
the only argument. Rank 0 prints a line per finished size for the progress bar and leaves the
samples in the plan's result file.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import horovod.torch as hvd
from benchmarks.buffers import rotating, verify

WARM_UP = 3
SAMPLES = (11, 2000)
LINE = 64  # bytes of a cache line
SPINS = 1000  # before a rank lets others have its core
SMALL_CALLS = 1000  # of the section with many small tensors,
SMALL_BYTES = 256  # each this big,
SMALL_SAMPLES = (5, 25)  # and how often it is repeated


class Contender(ABC):
    """One library's in-place float32 sum."""

    key: str
    returns_early = False  # on a device: before the sum is there

    def prepare(self, buffer: torch.Tensor) -> Any:
        """What `allreduce` takes for this buffer, made outside of the timed part."""
        return buffer

    @abstractmethod
    def allreduce(self, prepared: Any) -> None: ...

    def many(self, prepared: list[Any]) -> None:
        """Reduce many small tensors, in the library's usual way."""
        for item in prepared:
            self.allreduce(item)


class Ours(Contender):
    key = "ours"

    def allreduce(self, prepared: torch.Tensor) -> None:
        hvd.allreduce_(prepared, op=hvd.Sum, name="benchmark")

    def many(self, prepared: list[torch.Tensor]) -> None:
        handles = [
            hvd.allreduce_async_(item, op=hvd.Sum, name=f"benchmark.{index}")
            for index, item in enumerate(prepared)
        ]
        for handle in handles:
            hvd.synchronize(handle)


class Torch(Contender):
    """torch.distributed, with the backend that the tensor's device has in its default group."""

    returns_early = True

    def __init__(self, key: str) -> None:
        self.key = key  # the backend

    def allreduce(self, prepared: torch.Tensor) -> None:
        dist.all_reduce(prepared)


class OpenMPI(Contender):
    key = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.in_place = MPI.IN_PLACE
        self.float = MPI.FLOAT
        if self.comm.size != dist.get_world_size():
            raise RuntimeError(
                f"mpi4py sees {self.comm.size} rank(s) where mpirun started "
                f"{dist.get_world_size()}: it uses another MPI library. Point MPI4PY_LIBMPI at "
                f"the libmpi of the mpirun in use, or pass --no-mpi."
            )

    def prepare(self, buffer: torch.Tensor) -> list[Any]:
        return [buffer.numpy(), self.float]

    def allreduce(self, prepared: list[Any]) -> None:
        self.comm.Allreduce(self.in_place, prepared)


class Barrier:
    """Lets the ranks go within a microsecond, through counters in a file that all map.

    What a contender's own barrier does to the ranks' start must not count for or against it.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        with open(path, "a+b") as file:
            file.truncate(size * LINE)  # the same on all ranks, so it does not matter who is first
            self._counters = memoryview(mmap.mmap(file.fileno(), size * LINE)).cast("Q")
        self._mine = rank * LINE // 8
        self._places = range(0, size * LINE // 8, LINE // 8)
        self._round = 0
        self._patience = SPINS if size <= (os.cpu_count() or 1) else 1

    def __call__(self) -> None:
        self._round += 1
        self._counters[self._mine] = self._round
        for place in self._places:
            spins = 0
            while self._counters[place] < self._round:
                spins += 1
                if spins >= self._patience:
                    os.sched_yield()


class Race:
    """All contenders over the same buffers, a few calls each in turn."""

    def __init__(
        self,
        contenders: list[Contender],
        seconds: float,
        turn: int,
        barrier: Callable[[], None],
        device: torch.device,
    ) -> None:
        self.device = device
        self.contenders = contenders
        self.turn = turn  # calls of one contender before the next is due
        self.seconds = seconds
        self.barrier = barrier

    def allreduce(self, size: int) -> dict[str, list[float]]:
        """Microseconds of single calls on `size` bytes."""
        buffers = rotating(size, self.device)
        for contender in self.contenders:
            self._verify(contender, buffers[0])
        prepared = {c.key: [c.prepare(buffer) for buffer in buffers] for c in self.contenders}

        def call(contender: Contender, turn: int) -> None:
            contender.allreduce(prepared[contender.key][turn % len(buffers)])

        return self._time(call, *SAMPLES)

    def many(self) -> dict[str, list[float]]:
        """Microseconds of SMALL_CALLS small tensors together."""
        small = SMALL_BYTES // 4
        buffers = [torch.zeros(small, device=self.device) for _ in range(SMALL_CALLS)]
        prepared = {c.key: [c.prepare(buffer) for buffer in buffers] for c in self.contenders}

        def call(contender: Contender, turn: int) -> None:
            contender.many(prepared[contender.key])

        return self._time(call, *SMALL_SAMPLES)

    def _verify(self, contender: Contender, buffer: torch.Tensor) -> None:
        def allreduce(buffer: torch.Tensor) -> None:
            contender.allreduce(contender.prepare(buffer))
            if buffer.is_cuda and not contender.returns_early:
                stream = torch.cuda.current_stream(buffer.device)
                assert stream.query(), f"{contender.key} has returned before the sum was there"

        verify(contender.key, allreduce, buffer, dist.get_rank(), dist.get_world_size())

    def _time(self, call: Any, fewest: int, most: int) -> dict[str, list[float]]:
        if self.device.type == "cuda":
            call = completed(call, self.device)
        rough = self._samples(call, WARM_UP)
        per_round = float(rough.median(dim=1).values.sum()) / 1e6  # the same on every rank
        samples = self._samples(call, max(fewest, min(most, int(self.seconds / per_round))))
        rows = samples.tolist()
        return {c.key: row for c, row in zip(self.contenders, rows, strict=True)}

    def _samples(self, call: Any, count: int) -> torch.Tensor:
        """One row per contender: microseconds of each call, on the rank that took longest."""
        number = len(self.contenders)
        elapsed = torch.zeros(number, count, dtype=torch.float64)
        gc.collect()
        gc.disable()
        for turn, first in enumerate(range(0, count, self.turn)):
            for position in range(number):
                which = (position + turn) % number  # nobody is always the first
                for sample in range(first, min(first + self.turn, count)):
                    self.barrier()
                    begin = time.perf_counter_ns()
                    call(self.contenders[which], sample * number + position)
                    elapsed[which, sample] = time.perf_counter_ns() - begin
        gc.enable()
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return elapsed / 1000


def completed(call: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """The call and the wait for what it began on the device: only then there is a sum.

    Who has waited already, because its call returns no earlier, is not made to wait once more.
    """

    def call_and_wait(contender: Contender, turn: int) -> None:
        call(contender, turn)
        if contender.returns_early:
            torch.cuda.synchronize(device)

    return call_and_wait


def main() -> None:
    plan = json.loads(sys.argv[1])
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    size = plan["np"]
    torch.set_num_threads(1)
    device = torch.device(plan["device"])
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, size):
        raise RuntimeError(f"hvd.init() made rank {rank} of {size} {hvd.rank()} of {hvd.size()}")
    store = dist.FileStore(plan["rendezvous"], size)
    # Gloo also beside NCCL: samples are compared on the host.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    rival = OpenMPI() if plan["rival"] == "mpi" else Torch(plan["rival"])
    barrier = Barrier(plan["barrier"], rank, size)
    race = Race([Ours(), rival], plan["seconds"], plan["turn"], barrier, device)

    results: dict[str, Any] = {"allreduce": {}, "many": {}}

    def note(what: str) -> None:
        """Keep what there is: it counts also if something after it fails."""
        if rank == 0:
            result = Path(plan["result"])
            unfinished = result.with_suffix(".new")
            unfinished.write_text(json.dumps(results))
            unfinished.rename(result)
            print("done", what, flush=True)

    for nbytes in plan["sizes"]:
        results["allreduce"][nbytes] = race.allreduce(nbytes)
        note(str(nbytes))
    if plan["many"]:
        results["many"] = race.many()
        note("many")
    dist.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
