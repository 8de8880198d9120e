"""One call of a collective: its arguments, and how the engine is asked for it.

`Call` serves calls that run at once as well as calls in compiled programs. A compiled program
contains the arguments as text, so that it means the same in every process that loads it. Facts
about the job, such as its size, are read when the call runs, because in an elastic job a program
outlives changes of the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import ReduceOp
from horovod.engine.arguments import movement_inputs, reduction_inputs, set_id
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.execution.prepared import PreparedAllreduce
from horovod.engine.request import Request, caller
from horovod.engine.runtime import runtime
from horovod.engine.submission import check_adasum

Tensors = list[torch.Tensor]
Finish = Callable[[Any], Tensors]
Phase = Literal["whole", "start", "finish"]

# The name of compiled calls without one. They can share it, because they run one after the other.
_COMPILED_NAME = "jit"


_SUM = Reduction()


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a collective, the same on all ranks except for `splits`."""

    is_ordered: ClassVar[bool] = True  # programs must run calls in the order of the source

    kind: str  # a key of `_START`
    name: str | None = None
    reduction: Reduction = _SUM
    root_rank: int | None = None
    ranks: tuple[int, ...] | None = None  # the ranks of the process set; None for all ranks
    splits: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()  # the paths of a tree's leaves
    size: int | None = None  # the set's size, if a program's shapes depend on it
    ends_step: bool = False  # whether the call reduces the gradients of a step
    phase: Phase = "whole"  # the part of an allreduce in two calls: see `_run_phase`
    source_line: tuple[str, int] = ("", 0)  # file and line of the user's call, for messages

    @classmethod
    def of(cls, kind: str, process_set: ProcessSet, **arguments: Any) -> Call:
        """Make a call; ValueError if its process set is not registered."""
        set_id(process_set)
        ranks = None
        if process_set is not global_process_set:
            ranks = tuple(process_set.ranks or ())
        call = cls(kind=kind, ranks=ranks, source_line=caller(sys._getframe(1)), **arguments)
        check_adasum(call.reduction, all_ranks=ranks is None)
        return call

    @property
    def set_id(self) -> int:
        if self.ranks is None:
            return 0
        for number, ranks in runtime.process_set_ids_and_ranks().items():
            if tuple(ranks) == self.ranks:
                return number
        raise ValueError(f"there is no process set of the ranks {list(self.ranks)} any more")

    def collective(self, labels: tuple[str, ...] | None = None) -> Collective:
        """Return the engine's record of this call, with other labels if some are passed."""
        return Collective(
            Kind(self.kind),
            self.name,
            self.set_id,
            self.reduction,
            self.labels if labels is None else labels,
            self.root_rank,
            self.splits,
        )

    def start(self, tensors: Tensors, background: bool = True) -> tuple[Request, Finish]:
        """Submit the call to the engine, which only reads the tensors.

        Args:
            tensors: The inputs.
            background: False if the caller waits for the request at once.

        Returns:
            The request, and a function that turns its result into tensors.
        """
        return _START[self.kind](self, tensors, background)

    def count_step(self) -> None:
        """Count a step of an optimizer, if this call ends one; called when it has run."""
        if self.ends_step:
            runtime.statistics.end_step(buckets=1)

    # -- compiled ----------------------------------------------------------------------------

    def to_text(self) -> str:
        """Return the text of this call for a compiled program; `from_text` reads it."""
        return json.dumps(dataclasses.asdict(self))

    def run_compiled(self, sources: Tensors, targets: Tensors) -> None:
        """Run the call inside a program, whose memory the tensors are.

        The targets may share the memory of the sources.
        """
        if self.size is not None and self.size != runtime.group(self.set_id).size:
            raise HorovodInternalError(
                f"this program was compiled for {self.size} ranks, and there are "
                f"{runtime.group(self.set_id).size} now: call jax.clear_caches()"
            )
        if self.phase != "whole":
            _run_phase(self, sources, targets)
            return
        if self.kind == "allreduce":
            _reduce_compiled(self, sources, targets)
            self.count_step()
            return
        request, finish = self.start(sources, background=False)
        request.source_line = self.source_line
        for target, result in zip(targets, finish(request.wait()), strict=False):
            if target.shape != result.shape:
                raise HorovodInternalError(
                    f"{self.kind} in a compiled program made {tuple(result.shape)} where the "
                    f"program has {tuple(target.shape)}"
                )
            target.copy_(result.view(target.dtype))


@functools.lru_cache(maxsize=4096)
def from_text(text: bytes) -> Call:
    """Return the call that a compiled program contains as text."""
    arguments = json.loads(text)
    for name in ("ranks", "splits", "labels", "source_line"):
        if arguments[name] is not None:
            arguments[name] = tuple(arguments[name])
    op, *others = arguments["reduction"]
    arguments["reduction"] = Reduction(ReduceOp(op), *others)
    call = Call(**arguments)
    return call if call.name is not None else dataclasses.replace(call, name=_COMPILED_NAME)


# -- the request of each kind ----------------------------------------------------------------


def _allreduce(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    sources = reduction_inputs(tensors, call.reduction)
    outputs = [torch.empty_like(source) for source in sources]
    return runtime.submit(call.collective(), sources, outputs, background=background), list


def _allgather(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    sources = movement_inputs(tensors)
    return runtime.submit(call.collective(), sources, background=background), list


def _broadcast(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    """Broadcast tensors; several travel as one tensor of bytes, whose labels describe them."""
    sources = movement_inputs(tensors)
    if len(sources) == 1:
        packed, labels = sources[0], call.labels
        output = torch.empty_like(packed)
    else:
        packed = torch.cat([_to_bytes(source) for source in sources])
        output = packed
        labels = _describe(call.labels, sources)
    request = runtime.submit(call.collective(labels), [packed], [output], background=background)

    def finish(_: Any) -> Tensors:
        return [output] if len(sources) == 1 else _unpack(output, sources)

    return request, finish


def _reducescatter(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    sources = reduction_inputs(tensors, call.reduction)
    return runtime.submit(call.collective(), sources, background=background), list


def _alltoall(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    """Exchange rows; the last result is the number of rows received from each rank.

    Several tensors travel as one, whose rows are the concatenated bytes of their rows.
    """
    sources = movement_inputs(tensors)
    if len(sources) == 1:
        packed, labels = sources[0], call.labels
    else:
        if any(source.dim() == 0 for source in sources):
            raise ValueError("alltoall needs at least one dimension, got a scalar")
        if len({source.shape[0] for source in sources}) > 1:
            raise ValueError("alltoall of a tree needs leaves with the same first dimension")
        packed = torch.cat([_to_rows(source) for source in sources], dim=1)
        labels = _describe(call.labels, sources, any_rows=True)
    request = runtime.submit(call.collective(labels), [packed], background=background)

    def finish(result: tuple[torch.Tensor, list[int]]) -> Tensors:
        output, received = result
        if len(sources) == 1:
            outputs = [output]
        else:
            parts = torch.split(output, [_to_rows(source).shape[1] for source in sources], dim=1)
            outputs = [
                part.reshape(-1).clone().view(source.dtype).view(len(part), *source.shape[1:])
                for part, source in zip(parts, sources, strict=True)
            ]
        return [*outputs, torch.tensor(received, dtype=torch.int32)]

    return request, finish


_START: dict[str, Callable[[Call, Tensors, bool], tuple[Request, Finish]]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "reducescatter": _reducescatter,
    "alltoall": _alltoall,
}


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _to_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each row."""
    width = math.prod(tensor.shape[1:]) * tensor.itemsize
    return _to_bytes(tensor).view(tensor.shape[0], width)


def _unpack(packed: torch.Tensor, like: Tensors) -> Tensors:
    """Cut packed bytes into tensors with the types and shapes of `like`."""
    parts = torch.split_with_sizes(packed, [tensor.nbytes for tensor in like])
    # Copy the parts, which are not aligned for every type.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _describe(labels: Sequence[str], tensors: Tensors, any_rows: bool = False) -> tuple[str, ...]:
    """Add types and shapes to labels; with `any_rows` without the number of rows."""

    def form(tensor: torch.Tensor) -> str:
        shape = [None, *tensor.shape[1:]] if any_rows else list(tensor.shape)
        return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"

    names = labels or [str(index) for index in range(len(tensors))]
    return tuple(f"{name} {form(t)}" for name, t in zip(names, tensors, strict=True))


# -- allreduce in a program ------------------------------------------------------------------

# Entries of an earlier job (before a shutdown) refuse to run, and are then replaced.
_prepared: dict[tuple[Call, tuple[Any, ...]], PreparedAllreduce] = {}


def fill(targets: Tensors, sources: Tensors) -> None:
    """Copy the sources into the targets, except those that share their memory."""
    for source, target in zip(sources, targets, strict=True):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


def _reduce_compiled(call: Call, sources: Tensors, targets: Tensors) -> None:
    """Reduce in the memory of the results; repeated reductions take the engine's prepared path."""
    fill(targets, sources)
    forms = tuple((target.dtype, target.shape) for target in targets)
    on_host = targets[0].is_cpu
    prepared = _prepared.get((call, forms)) if on_host else None
    if prepared is not None:
        vector = targets if len(targets) > 1 else [targets[0].view(-1)]
        if prepared.allreduce_inline(vector):
            return
    buffers = reduction_inputs(targets, call.reduction)
    # On a GPU the program's stream waits for the result, not this thread.
    request = runtime.submit(call.collective(), buffers, buffers, background=False, deferred=True)
    prepared = runtime.prepare(request) if on_host else None
    if prepared is not None:
        if len(_prepared) >= runtime.config.cache_capacity:
            _prepared.clear()
        _prepared[call, forms] = prepared
    request.source_line = call.source_line
    request.wait()


# -- allreduce in two calls ------------------------------------------------------------------


class _Exchange(NamedTuple):
    """An allreduce that one call has started, and that another will finish."""

    topology: Any  # the job in which it was started
    number: int  # the number that both calls have in common
    request: Request
    tensors: Tensors


_under_way: dict[tuple[tuple[int, ...] | None, str | None, int], _Exchange] = {}


def _run_phase(call: Call, sources: Tensors, targets: Tensors) -> None:
    """Start an allreduce that goes on beside the program, or finish it.

    The first tensor holds two numbers: one of the caller in this process, and one that both calls
    share. The other tensors are what this rank sends, in both calls: if this process has not
    started the allreduce, because training goes on from a checkpoint, the second call does all of
    it. On a GPU the second call always does, because there is no other stream than the program's.
    """
    fill(targets, sources)
    tensors = targets[1:]
    if not targets[0].is_cpu:
        if call.phase == "finish":
            _reduce_compiled(call, tensors, tensors)
        return
    owner, number = targets[0].tolist()
    key = call.ranks, call.name, owner
    topology = runtime.topology
    for (_, name, _), exchange in _under_way.items():
        # At most one exchange of a name may run. Exchanges of an earlier job are over.
        is_current = exchange.topology is topology
        if name == call.name and is_current and not exchange.request.finished:
            exchange.request.wait()
    earlier = _under_way.pop(key, None)
    if call.phase == "start":
        copies = reduction_inputs([tensor.clone() for tensor in tensors], call.reduction)
        request = runtime.submit(call.collective(), copies, copies)
        request.source_line = call.source_line
        _under_way[key] = _Exchange(topology, number, request, copies)
    elif earlier is not None and earlier.number == number and earlier.topology is topology:
        earlier.request.wait()
        for tensor, average in zip(tensors, earlier.tensors, strict=True):
            tensor.copy_(average)
    else:
        _reduce_compiled(call, tensors, tensors)
