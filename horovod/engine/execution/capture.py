"""Collectives in a CUDA graph: what is captured, and what each replay tells the other ranks.

A graph is captured once, and then replayed without any of our code. Ranks cannot agree in a replay,
so they do what they do for the gradients of an optimizer (`lane`): the reductions are begun on
lanes without asking, in an order that is the same each time, and the ranks compare what they have
begun while the device works.

`horovod.torch.graphs` makes a `GraphCapture` for each graph. While one is `active`, the engine
shows it every operation, and an optimizer adds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Kind, LanePlan
from horovod.engine.execution.lane import Lane
from horovod.engine.execution.scaling import finish_, scale_
from horovod.engine.request import Request

_TYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)  # that the device's library adds up as they are

_HINT = (
    "In a captured step only allreduce by Sum or Average, of tensors on the device, and the "
    "gradients of a DistributedOptimizer can be reduced; call everything else outside of it"
)


class CapturedReductions(Protocol):
    """The reductions of one lane that are part of a graph."""

    lane: Lane

    def finish_comparison(self) -> None:
        """Wait until the ranks have compared what they began last; raise what they found."""

    def replayed(self) -> None:
        """Have the ranks compare what they began by handing the graph to the device once more."""


class GraphCapture:
    """One graph's collectives.

    Args:
        open_lane: Opens a lane for the ranks of a process set, on all of them.
    """

    def __init__(self, open_lane: Callable[[int], Lane | None]) -> None:
        self.is_on = False  # whether the device's work is being captured
        self.parts: list[CapturedReductions] = []
        self._open_lane = open_lane
        self._wanted: set[int] = set()  # process sets in which the step itself reduces
        self._own: dict[int, _StepReductions] = {}  # what it reduces there

    def note(self, request: Request, set_id: int) -> None:
        """Note an operation of a step that still runs as usual, and is to be captured later."""
        if request.kind is Kind.ALLREDUCE:
            self._wanted.add(set_id)

    def open_lanes(self) -> None:
        """Open the lanes that the step will need, in the same order on all ranks."""
        for set_id in sorted(self._wanted - self._own.keys()):
            lane = self._open_lane(set_id)
            if lane is not None:
                self._own[set_id] = _StepReductions(lane)

    def add(self, part: CapturedReductions) -> None:
        """Make reductions, such as those of an optimizer, a part of the graph."""
        if part not in self.parts:
            self.parts.append(part)

    def take(self, request: Request, set_id: int, size: int) -> Request:
        """Capture the operation in place of running it; raise where that is not possible."""
        own = self._own.get(set_id)
        if (
            (own is None and size > 1)
            or request.kind is not Kind.ALLREDUCE
            or request.reduction.op not in (ReduceOp.SUM, ReduceOp.AVERAGE)
            or any(tensor.is_cpu or tensor.dtype not in _TYPES for tensor in request.tensors)
        ):
            raise cannot_capture(request)
        if own is not None:
            self.add(own)
        for source, target in zip(request.tensors, request.outputs, strict=True):
            if source is not target:
                target.copy_(source)
            scale_(target, request.reduction.prescale_factor)
            if own is not None:
                own.reduce(target.view(-1))
            finish_(target, request.reduction, size)
        request.complete(request.outputs)
        return request


class _StepReductions:
    """What a step reduces itself in one process set, on a lane of the graph's own."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._forms: list[tuple[torch.dtype, int]] = []
        self._confirmation: Request | None = None

    def reduce(self, flat: torch.Tensor) -> None:
        """Sum up a flat tensor in place, in the order of the current stream."""
        if flat.numel():
            self.lane.allreduce(flat).wait()
            self._forms.append((flat.dtype, flat.numel()))

    def finish_comparison(self) -> None:
        confirmation, self._confirmation = self._confirmation, None
        if confirmation is not None:
            confirmation.wait()

    def replayed(self) -> None:
        self._confirmation = self.lane.confirm(LanePlan.of(self._forms))
        self.lane.mark()


active: GraphCapture | None = None  # the graph that is to see what the program calls


def is_on() -> bool:
    """Return whether what the program does is being captured, and not done."""
    return active is not None and active.is_on


@contextmanager
def shown_to(capture: GraphCapture, is_on: bool) -> Iterator[None]:
    """Show a graph what the program calls, and whether the device's work is being captured."""
    global active
    if active is not None:
        raise RuntimeError("a step that hvd.graphed captures may not call another one")
    active, capture.is_on = capture, is_on
    try:
        yield
    finally:
        active, capture.is_on = None, False


def is_captured(tensor: torch.Tensor) -> bool:
    """Return whether work on this tensor, in the current stream, becomes part of a graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def show(request: Request, set_id: int, size: int) -> Request | None:
    """Let a graph that is being made see an operation on tensors, in a set of `size` ranks.

    Returns:
        The request, finished, where it was captured in place of being run.

    Raises:
        RuntimeError: It cannot be captured, or a graph of the program's own would capture it.
    """
    if active is not None:
        if active.is_on:
            return active.take(request, set_id, size)
        active.note(request, set_id)
    elif request.tensors and is_captured(request.tensors[0]):
        raise RuntimeError(
            "Horovod's collectives cannot be captured by torch.cuda.graph alone, because the ranks "
            "have to agree: use hvd.graphed(step), which captures the step and compares with the "
            "other ranks at every replay"
        )
    return None


def cannot_capture(request: Request) -> RuntimeError:
    """Return the error about an operation that cannot be part of a graph."""
    what = f"{request.kind.value} {request.name.partition('.')[2]!r}"
    if request.kind is Kind.ALLREDUCE:
        types = ", ".join(sorted({str(tensor.dtype) for tensor in request.tensors}))
        devices = ", ".join(sorted({tensor.device.type for tensor in request.tensors}))
        what += f" ({request.reduction.op.name} of {types} on {devices})"
    return RuntimeError(
        f"{what} at {request.source} cannot be captured into a CUDA graph: a replay runs without "
        f"Python, and the other ranks would not take part. {_HINT}"
    )
