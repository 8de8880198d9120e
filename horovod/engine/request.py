"""One named operation waiting to run: what the engine's queues hold and the caller's handle to it.

A request's *signature*, 64 bits over everything that must be equal on all ranks, is what ranks
compare to agree on what to run next.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from horovod.common.exceptions import HorovodInternalError, fresh_copy
from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.observe.statistics.compilations import graph_count
from horovod.observe.statistics.counters import DeviceTiming
from horovod.transport.eight_bits import ROW, is_coded, num_rows

# Files whose frames are not the program's: this package, torch, and code that torch makes.
_INNER = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(torch.__file__).resolve().parent),
    "<eval_with_key>",
)


class RoundDriver(Protocol):
    """Where a request is submitted: it runs the rounds that finish requests."""

    def drive(self, request: Request) -> None:
        """Run rounds in this thread until `request` is finished."""

    def wait_beside(self, request: Request, seconds: float) -> None:
        """Wait while another thread runs rounds, at most `seconds`, until `request` is finished."""


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """An operation in a channel's queue. Callers hold it as their handle."""

    driver: RoundDriver | None  # None: nobody waits for it
    collective: Collective
    name: str  # on the wire
    signature: bytes
    tensors: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    is_exclusive: bool = False  # not to be fused with other requests
    waiting: bool = False
    nbytes: float = inf  # in all, if known to be of one dtype and on one device
    change: Callable[[], Any] | None = None  # what every rank does instead of a collective
    stream: Any = None  # the stream in which the caller gives work to the device
    event: Any = None  # marks the work there that must be done before ours may start
    deferred: bool = False  # whether it is finished as soon as the device knows what to do
    ready: Any = None  # if deferred, the event that tells when the device has done it
    timing: DeviceTiming | None = None  # of the device's work, for statistics
    on_failure: Callable[[HorovodInternalError], object] | None = None  # told if it fails
    finished: bool = False
    finished_at: float = 0.0
    failure: HorovodInternalError | None = None
    result: Any = None
    kind: Kind = field(init=False)  # these two are the collective's
    reduction: Reduction = field(init=False)
    plain: bool = field(init=False)  # one tensor in host memory, to be shown to others as it is
    source_line: tuple[str, int] = field(init=False)
    submitted: float = field(init=False)
    thread: int = field(init=False)

    def __post_init__(self) -> None:
        self.kind, self.reduction = self.collective.kind, self.collective.reduction
        self.plain = (
            self.kind is Kind.ALLREDUCE
            and len(self.tensors) == 1
            and self.reduction.prescale_factor == 1.0
            and self.reduction.op is not ReduceOp.ADASUM
            and self.tensors[0].is_cpu
        )
        self.source_line = caller(sys._getframe(2))
        self.submitted = time.monotonic()
        self.thread = threading.get_ident()

    def follow_stream(self) -> None:
        """Let the device begin this after all work that this thread has given it so far."""
        if self.tensors and not self.tensors[0].is_cpu:
            device = self.tensors[0].device
            module = torch.get_device_module(device)
            self.stream = module.current_stream(device)
            self.event = module.Event()
            self.event.record(self.stream)

    def done(self) -> bool:
        """Return whether the result, or the failure, is there."""
        return self.finished

    def wait(self) -> Any:
        """Wait for the result and return it; raise what went wrong."""
        if not self.finished:
            self.waiting = True
            assert self.driver is not None
            self.driver.drive(self)
        if self.failure is not None:
            raise self.failure
        if self.ready is not None:
            if self.timing is not None:
                self.timing.ask()
            self.ready.wait()  # not this thread waits, but what it gives the device next
        return self.result

    def wait_beside(self, seconds: float) -> None:
        """Wait for the background thread to finish this request, but none that follow it.

        Returns after `seconds` at the latest. `wait` would work together with that thread, and so
        return only when all that the thread has begun is done.
        """
        assert self.driver is not None
        self.driver.wait_beside(self, seconds)

    def complete(self, result: Any) -> None:
        self.result = result
        self.finished_at = time.monotonic()
        self.finished = True  # last: other threads look at it without a lock, and read the rest

    def fail(self, error: HorovodInternalError) -> None:
        if not self.finished:
            self.failure = fresh_copy(error)
            self.finished_at = time.monotonic()
            self.finished = True
            if self.on_failure is not None:
                self.on_failure(error)

    @property
    def label(self) -> str:
        """The kind as the timeline calls it."""
        return "adasum" if self.reduction.op is ReduceOp.ADASUM else self.kind.value

    @property
    def source(self) -> str:
        """The user's line that submitted this, as file:line."""
        return f"{self.source_line[0]}:{self.source_line[1]}"

    def describe(self) -> dict[str, Any]:
        """Return all that another rank needs to compare this request, or to run it with zeros."""
        collective, reduction = self.collective, self.reduction
        wire, plan = reduction.wire, collective.plan
        return {
            "kind": self.kind.value,
            "labels": list(collective.labels),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors],
            "shapes": [list(tensor.shape) for tensor in self.tensors],
            "device": self.tensors[0].device.type if self.tensors else "cpu",
            "op": int(reduction.op),
            "prescale_factor": reduction.prescale_factor,
            "postscale_factor": reduction.postscale_factor,
            "wire": None if wire is None else str(wire).removeprefix("torch."),
            "is_exclusive": self.is_exclusive,
            "root_rank": collective.root_rank,
            "reason": collective.reason,
            "change": list(collective.change),
            "plan": None if plan is None else plan.describe(),
            "source": self.source,
            "graphs": graph_count(),
        }


def bytes_on_wire(nbytes: int, dtype: torch.dtype, wire: torch.dtype | None) -> int:
    """Return how many bytes tensors of `nbytes` are when they travel between hosts as `wire`."""
    if wire is None:
        return nbytes
    count = nbytes // dtype.itemsize
    if is_coded(wire):
        return min(nbytes, num_rows(count) * ROW)
    return count * min(dtype.itemsize, wire.itemsize)


def caller(frame: FrameType) -> tuple[str, int]:
    """Return file and line of the innermost frame outside this package and outside torch.

    torch's frames are between a program and its backward hooks, and what torch has compiled.
    """
    while frame.f_code.co_filename.startswith(_INNER) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
