"""The records of what a caller asks for: a `Collective`, with the `Reduction` that it may contain.

Bindings make them of their users' arguments and hand them to `runtime.submit`, with tensors. A
request keeps its record, so a parameter has one name from the call to the transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from horovod.common.reduce_op import ReduceOp

WORLD = 0  # id of the process set of all ranks


class Kind(str, Enum):
    """What a collective does; the value begins its name on the wire."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    REQUIRE_ALL = "require_all"
    JOIN = "join"
    PROCESS_SET = "process_set"
    ALGORITHM = "algorithm"
    LANE = "lane"  # opens a lane: see `horovod.engine.execution.lane`
    CONFIRM = "gradients"  # compares what a step has begun on a lane

    __hash__ = str.__hash__  # an Enum's own is written in Python, and records are keys


# First dimensions may differ between ranks.
_RAGGED = (Kind.ALLGATHER, Kind.ALLTOALL)


class Reduction(NamedTuple):
    """How the tensors of all ranks become one."""

    op: ReduceOp = ReduceOp.SUM
    prescale_factor: float = 1.0  # multiplies tensors before the reduction
    postscale_factor: float = 1.0  # multiplies the result
    wire: torch.dtype | None = None  # the narrower type in which tensors travel between hosts

    @property
    def is_scaled(self) -> bool:
        """Whether one of the factors changes anything."""
        return self.prescale_factor != 1.0 or self.postscale_factor != 1.0


@dataclass(frozen=True)
class LanePlan:
    """The reductions that a step begins on a lane, in this order, which all ranks have."""

    dtypes: tuple[str, ...]  # of the flat tensors, such as "float32"
    counts: tuple[int, ...]  # of their elements

    @classmethod
    def of(cls, forms: Sequence[tuple[torch.dtype, int]]) -> LanePlan:
        dtypes = tuple(str(dtype).removeprefix("torch.") for dtype, _ in forms)
        return cls(dtypes, tuple(count for _, count in forms))

    def describe(self) -> list[Any]:
        """Return the plan as JSON takes it; `LanePlan(*described)` is the plan again."""
        return [list(self.dtypes), list(self.counts)]


class Collective(NamedTuple):
    """One collective operation, without its tensors. Ranks may differ in nothing but `splits`."""

    kind: Kind
    name: str | None  # the user's; without one, ranks match collectives by the order of their calls
    process_set_id: int = WORLD
    reduction: Reduction = Reduction()  # for allreduce and reducescatter
    labels: tuple[str, ...] = ()  # what the user calls the tensors, for errors about differences
    root_rank: int | None = None  # for broadcast: a rank of the world
    splits: tuple[int, ...] | None = None  # for alltoall: rows for each rank; None: equal parts
    reason: str = ""  # for require_all: why no rank may be missing
    change: tuple[str | int, ...] = ()  # for process_set, algorithm and lane: what changes
    plan: LanePlan | None = None  # for confirm


def signature_of(collective: Collective, name: str, tensors: Sequence[torch.Tensor] = ()) -> bytes:
    """Return 64 bits over all that the ranks must agree on; `name` is the one on the wire."""
    ragged = collective.kind in _RAGGED
    forms = [
        (
            str(tensor.dtype),
            tensor.device.type,
            tensor.dim(),
            tuple(tensor.shape[1:]) if ragged else tuple(tensor.shape),
        )
        for tensor in tensors
    ]
    op, *others = collective.reduction
    own = collective.root_rank, collective.reason, collective.change, collective.plan
    text = repr((collective.kind.value, name, forms, int(op), others, own, collective.labels))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
