"""One call of a collective: its terms, and how the engine is asked for it.

The same for a call that runs at once, whose arrays are torch tensors by then, and for one that is
part of a compiled program. There the terms travel as text inside the program, so that a program
means the same in every process that loads it. What depends on the job, such as its size, is read
when the call runs: in an elastic job a program outlives changes of the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Average, ReduceOp
from horovod.engine.arguments import movement_input, reduction_input, set_id
from horovod.engine.prepared import PreparedAllreduce
from horovod.engine.request import Request, caller
from horovod.engine.runtime import runtime

Tensors = list[torch.Tensor]
Finish = Callable[[Any], Tensors]

# torch knows these types but moves only their signed twins.
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

# Compiled calls run one after the other, so that those without a name can share one.
_COMPILED = "jit"


@dataclasses.dataclass(frozen=True)
class Call:
    """What all ranks must say alike, and what each says for itself (`splits`)."""

    is_ordered: ClassVar[bool] = True  # in programs

    kind: str  # the name of a function below
    name: str | None = None
    op: int = int(Average)
    prescale: float = 1.0
    postscale: float = 1.0
    root_rank: int = 0
    ranks: tuple[int, ...] | None = None  # of the process set; None: all
    splits: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()  # the paths of a tree's leaves
    size: int | None = None  # of the process set, where a compiled program depends on it
    ends_step: bool = False  # whether it reduces the gradients of a step
    source: tuple[str, int] = ("", 0)  # file and line of the user's call, for messages

    @classmethod
    def of(cls, kind: str, process_set: ProcessSet, **terms: Any) -> Call:
        """A call whose process set is registered; ValueError if it is not."""
        set_id(process_set)
        ranks = None
        if process_set is not global_process_set:
            ranks = tuple(process_set.ranks or ())
        if terms.get("op") is Adasum and ranks is not None:
            raise NotImplementedError("Adasum works on the global process set only")
        return cls(kind=kind, ranks=ranks, source=caller(sys._getframe(1)), **terms)

    @property
    def reduction(self) -> ReduceOp:
        return ReduceOp(self.op)

    @property
    def is_scaled(self) -> bool:
        return self.prescale != 1.0 or self.postscale != 1.0

    @property
    def set_id(self) -> int:
        if self.ranks is None:
            return 0
        for number, ranks in runtime.process_set_ids_and_ranks().items():
            if tuple(ranks) == self.ranks:
                return number
        raise ValueError(f"there is no process set of the ranks {list(self.ranks)} any more")

    def start(self, tensors: Tensors, background: bool = True) -> tuple[Request, Finish]:
        """Ask the engine; also what turns its result into tensors. The inputs are only read.

        Without `background` the caller waits at once.
        """
        return _START[self.kind](self, tensors, background)

    def tell_step(self) -> None:
        """It has run: if that was a step of an optimizer, count it."""
        if self.ends_step:
            runtime.statistics.end_step(buckets=1)

    # -- compiled ----------------------------------------------------------------------------

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def run_compiled(self, sources: Tensors, targets: Tensors) -> None:
        """Do it in the middle of a program, whose memory these are. `targets` may be `sources`."""
        if self.size is not None and self.size != runtime.group(self.set_id).size:
            raise HorovodInternalError(
                f"this program was compiled for {self.size} ranks, and there are "
                f"{runtime.group(self.set_id).size} now: call jax.clear_caches()"
            )
        if self.kind == "allreduce":
            _reduce_compiled(self, sources, targets)
            self.tell_step()
            return
        request, finish = self.start(sources, background=False)
        request.source_line = self.source
        for target, result in zip(targets, finish(request.wait()), strict=False):
            if target.shape != result.shape:
                raise HorovodInternalError(
                    f"{self.kind} in a compiled program made {tuple(result.shape)} where the "
                    f"program has {tuple(target.shape)}"
                )
            target.copy_(result.view(target.dtype))


@functools.lru_cache(maxsize=4096)
def from_text(text: bytes) -> Call:
    """The call that a program has in it."""
    terms = json.loads(text)
    for name in ("ranks", "splits", "labels", "source"):
        if terms[name] is not None:
            terms[name] = tuple(terms[name])
    call = Call(**terms)
    return call if call.name is not None else dataclasses.replace(call, name=_COMPILED)


# -- what each kind asks for -----------------------------------------------------------------


def _allreduce(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    sources = [reduction_input(tensor, call.reduction, call.is_scaled) for tensor in tensors]
    outputs = [torch.empty_like(source) for source in sources]
    request = runtime.allreduce(
        sources,
        outputs,
        call.name,
        call.reduction,
        prescale=call.prescale,
        postscale=call.postscale,
        process_set_id=call.set_id,
        background=background,
        labels=call.labels,
    )
    return request, list


def _allgather(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    sources = [movement_input(_signed(tensor)) for tensor in tensors]
    request = runtime.allgather(
        sources, call.name, process_set_id=call.set_id, background=background, labels=call.labels
    )
    return request, list


def _broadcast(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    """Several travel as one, as bytes; the labels then say what they are."""
    sources = [movement_input(_signed(tensor)) for tensor in tensors]
    if len(sources) == 1:
        packed, labels = sources[0], call.labels
        output = torch.empty_like(packed)
    else:
        packed = torch.cat([_bytes(source) for source in sources])
        output = packed
        labels = _described(call.labels, sources)
    request = runtime.broadcast(
        packed,
        output,
        call.root_rank,
        call.name,
        process_set_id=call.set_id,
        background=background,
        labels=labels,
    )

    def finish(_: Any) -> Tensors:
        return [output] if len(sources) == 1 else _unpacked(output, sources)

    return request, finish


def _reducescatter(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    sources = [reduction_input(tensor, call.reduction, call.is_scaled) for tensor in tensors]
    request = runtime.reducescatter(
        sources,
        call.name,
        call.reduction,
        prescale=call.prescale,
        postscale=call.postscale,
        process_set_id=call.set_id,
        background=background,
        labels=call.labels,
    )
    return request, list


def _alltoall(call: Call, tensors: Tensors, background: bool) -> tuple[Request, Finish]:
    """Several travel as one whose rows are theirs side by side. The last result: received rows."""
    sources = [movement_input(_signed(tensor)) for tensor in tensors]
    if len(sources) == 1:
        packed, labels = sources[0], call.labels
    else:
        if any(source.dim() == 0 for source in sources):
            raise ValueError("alltoall needs at least one dimension, got a scalar")
        if len({source.shape[0] for source in sources}) > 1:
            raise ValueError("alltoall of a tree needs leaves with the same first dimension")
        packed = torch.cat([_rows(source) for source in sources], dim=1)
        labels = _described(call.labels, sources, rows=True)
    request = runtime.alltoall(
        packed,
        call.splits or None,
        call.name,
        process_set_id=call.set_id,
        background=background,
        labels=labels,
    )

    def finish(result: tuple[torch.Tensor, list[int]]) -> Tensors:
        output, received = result
        if len(sources) == 1:
            outputs = [output]
        else:
            parts = torch.split(output, [_rows(source).shape[1] for source in sources], dim=1)
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


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    twin = _SIGNED.get(tensor.dtype)
    return tensor if twin is None else tensor.view(twin)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each row."""
    width = math.prod(tensor.shape[1:]) * tensor.itemsize
    return _bytes(tensor).view(tensor.shape[0], width)


def _unpacked(packed: torch.Tensor, like: Tensors) -> Tensors:
    parts = torch.split_with_sizes(packed, [tensor.nbytes for tensor in like])
    # Copies: the parts are not aligned for every type.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _described(labels: Sequence[str], tensors: Tensors, rows: bool = False) -> tuple[str, ...]:
    """Labels that also tell type and shape, without the number of rows where it may differ."""

    def form(tensor: torch.Tensor) -> str:
        shape = [None, *tensor.shape[1:]] if rows else list(tensor.shape)
        return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"

    names = labels or [str(index) for index in range(len(tensors))]
    return tuple(f"{name} {form(t)}" for name, t in zip(names, tensors, strict=True))


# -- allreduce in a program ------------------------------------------------------------------

# Those of an earlier job refuse, and are replaced.
_prepared: dict[tuple[Call, tuple[Any, ...]], PreparedAllreduce] = {}


def _reduce_compiled(call: Call, sources: Tensors, targets: Tensors) -> None:
    """Reduce where the results are to be; what has been reduced before goes the shortest way."""
    for source, target in zip(sources, targets, strict=True):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
    number = call.set_id
    forms = tuple((target.dtype, target.shape) for target in targets)
    on_host = targets[0].is_cpu
    prepared = _prepared.get((call, forms)) if on_host else None
    if prepared is not None:
        vector = targets if len(targets) > 1 else [targets[0].view(-1)]
        if prepared.allreduce_inline(vector):
            return
    buffers = [reduction_input(target, call.reduction, call.is_scaled) for target in targets]
    request = runtime.allreduce(
        buffers,
        buffers,
        call.name,
        call.reduction,
        prescale=call.prescale,
        postscale=call.postscale,
        process_set_id=number,
        background=False,
        deferred=True,  # the program's stream waits, not this thread
        labels=call.labels,
    )
    prepared = runtime.prepare(request, number) if on_host else None
    if prepared is not None:
        if len(_prepared) >= runtime.config.cache_capacity:
            _prepared.clear()
        _prepared[call, forms] = prepared
    request.source_line = call.source
    request.wait()
