"""CUDA graphs: a training step that is captured once and then replayed, on all ranks.

A replay hands hundreds of kernels to the device in one call, where Python would take longer than
the device. What the step reduces is part of the graph. `horovod.engine.execution.capture` says how
the ranks still notice that one of them is lost, or does something else.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from horovod.common.topology import Topology
from horovod.engine.execution.capture import GraphCapture, shown_to
from horovod.engine.execution.lane import Lane
from horovod.engine.runtime import runtime
from horovod.transport.device.farewells import none_under_way

__all__ = ["GraphedStep", "graphed"]

R = TypeVar("R")

_made = 0  # graphs of this process: as many on all ranks, which make them in the same order


def graphed(step: Callable[..., R], *, warmup: int = 3) -> GraphedStep[R]:
    """Capture a training step into a CUDA graph, with what it reduces, and replay it.

    The first `warmup` calls run the step as it is. The next one captures it, and from then on each
    call copies its arguments into the captured ones and replays the graph. Every call is one step
    of training, with the same results as without a graph.

    All ranks must use it alike. The usual rules of CUDA graphs hold: the step may not look at
    values of tensors (`.item()`), its shapes do not change, an optimizer such as Adam needs
    `capturable=True`, and numbers such as the learning rate are captured as they are. Of our
    collectives it may use `allreduce` by Sum or Average and a `DistributedOptimizer`.

    Args:
        step: The function. Its arguments are tensors on one CUDA device, or trees of them; other
            values must be equal in every call.
        warmup: Steps before the capture, at least 2: in them the ranks agree on what is reduced.

    Returns:
        A function with the same arguments. The tensors that it returns are overwritten by the next
        call. After an elastic job has re-formed it warms up and captures again.

    Raises:
        ValueError: `warmup` is too small; or, in a call of the result, an argument has another
            shape, type or value than the captured one.
        RuntimeError: In a call of the result: there is no CUDA device, or the step does something
            that cannot be captured.
        HorovodInternalError: In a call of the result: a rank is lost, or has captured something
            else.

    Examples:
        >>> step = hvd.graphed(train_step)
        >>> for inputs, targets in loader:
        ...     loss = step(inputs.cuda(), targets.cuda())
    """
    if warmup < 2:
        raise ValueError(f"warmup must be at least 2 steps, got {warmup}")
    return GraphedStep(step, warmup)


class GraphedStep(Generic[R]):
    """What `graphed` returns: a step, its graph, and the tensors that it reads and writes."""

    def __init__(self, step: Callable[..., R], warmup: int) -> None:
        global _made
        _made += 1
        update_wrapper(self, step)
        self._step = step
        self._warmup = warmup
        self._name = f"graph {_made}"
        self._topology: Topology | None = None  # the job in which the step was captured
        self._lock = threading.Lock()  # held while the graph is in use, or dropped
        self._graph: torch.cuda.CUDAGraph | None = None
        self._forget()

    def _forget(self) -> None:
        """Drop the graph and start from the beginning, because another job has begun."""
        self.drop()
        self._steps = 0
        self._is_captured = False
        self._capture = GraphCapture(self._open_lane)
        self._inputs: list[Any] = []
        self._form: Any = None
        self._stream: Any = None
        self._outputs: Any = None

    def drop(self) -> None:
        """Release the graph, because what it uses is about to end. Any thread may call this."""
        with self._lock:
            graph, self._graph = self._graph, None
            if graph is not None:
                graph.reset()

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "hvd.graphed needs a CUDA device, and torch finds none: call the step itself"
            )
        if self._topology is not runtime.topology:
            self._forget()
            self._topology = runtime.topology
        inputs, form = tree_flatten((args, kwargs))
        if not self._is_captured and self._steps < self._warmup:
            return self._run(args, kwargs)
        if not self._is_captured:
            self._capture_step(inputs, form)
        else:
            self._fill(inputs, form)
        self._replay()
        outputs: R = self._outputs
        return outputs

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run the step as it is, in the stream in which it will be captured."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), shown_to(self._capture, is_on=False):
            result = self._step(*args, **kwargs)
        current.wait_stream(self._stream)
        self._steps += 1
        return result

    def _capture_step(self, inputs: Sequence[Any], form: Any) -> None:
        """Capture what the step does with copies of these arguments; nothing runs yet."""
        self._capture.open_lanes()
        self._inputs = [
            value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs
        ]
        self._form = form
        args, kwargs = tree_unflatten(self._inputs, form)
        graph = torch.cuda.CUDAGraph()
        with (
            _nothing_else_ends(),
            shown_to(self._capture, is_on=True),
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._outputs = self._step(*args, **kwargs)
        self._graph = graph
        self._is_captured = True
        drop = weakref.WeakMethod(self.drop)

        def forget() -> None:
            found = drop()
            if found is not None:
                found()

        for part in self._capture.parts:
            part.lane.add_graph(forget)

    def _fill(self, inputs: Sequence[Any], form: Any) -> None:
        """Copy the arguments to where the graph reads them."""
        if form != self._form:
            raise ValueError(
                f"the captured step takes {self._form}, and this call passes {form}: call it with "
                "the same arguments each time"
            )
        for number, (captured, value) in enumerate(zip(self._inputs, inputs, strict=True)):
            if not isinstance(captured, torch.Tensor):
                if captured is not value and captured != value:
                    raise ValueError(
                        f"argument {number} was {captured!r} when the step was captured, and is "
                        f"{value!r} now: pass what changes as a tensor"
                    )
            elif captured is not value:
                _check_alike(number, captured, value)
                captured.copy_(value, non_blocking=True)

    def _replay(self) -> None:
        """Hand the graph to the device, and have the ranks compare what they have begun."""
        parts = self._capture.parts
        for part in parts:
            part.finish_comparison()
        with self._lock:
            if self._graph is not None:
                self._graph.replay()
        if self._graph is None:  # it was dropped
            for part in parts:
                part.lane.check_usable()
            raise RuntimeError(
                "the captured step cannot be replayed any more: Horovod was shut down, or the "
                "optimizer whose gradients it reduces is gone"
            )
        for part in parts:
            part.replayed()
        runtime.statistics.end_step()

    def _open_lane(self, set_id: int) -> Lane | None:
        device = torch.device("cuda", torch.cuda.current_device())
        return runtime.open_lane(set_id, self._name, device)


@contextmanager
def _nothing_else_ends() -> Iterator[None]:
    """Collect garbage now, wait for communicators that end, and collect none inside the block.

    A graph or communicator that ends, as it may in any collection, calls the driver in ways that
    end a capture with an error.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with none_under_way():
            yield
    finally:
        if was_enabled:
            gc.enable()


def _check_alike(number: int, captured: torch.Tensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"argument {number} must be a tensor, as it was at first; got {value!r}")
    if value.shape != captured.shape or value.dtype is not captured.dtype:
        raise ValueError(
            f"argument {number} is {value.dtype} of shape {tuple(value.shape)}, and was "
            f"{captured.dtype} of shape {tuple(captured.shape)} when the step was captured: drop "
            "batches that are not full, or call the step itself for them"
        )
