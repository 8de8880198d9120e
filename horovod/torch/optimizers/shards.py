"""Cuts parameters into slices, one rank's each, and shares the slices after an update.

Used by the sharded optimizer. A slice is a range of a parameter's elements in the order of its
memory; this rank's slices are views, so that updating them updates the parameters in place. Where
an update needs whole parameters, each is one slice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet
from horovod.engine.arguments import set_id
from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime
from horovod.torch.gradients.layouts import in_memory_order

# A parameter may be cut at multiples of this many elements from its first. Kernels work on whole
# vectors and do the rest element by element, rounding differently at times, so an element must keep
# the position in a vector that it has in the uncut parameter.
GRAIN = 64
PACK_BELOW = 32 * 1024  # bytes: larger slices are sent from where they are

Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class Slice:
    """Elements [start, stop) of a parameter, in the order of its memory, and who updates them."""

    param: Parameter
    start: int
    stop: int
    owner: int  # rank in the process set

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.param.numel()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a tensor of the parameter's shape; a whole one keeps its shape."""
        if self.is_whole:
            return tensor.detach()
        return in_memory_order(tensor, self.param)[self.start : self.stop]

    def of_state(self, value: Any) -> Any:
        """Return the slice of an entry of optimizer state; what is not by element stays whole."""
        if self.is_whole or not isinstance(value, torch.Tensor) or value.shape != self.param.shape:
            return value
        return self.of(value).clone()  # a view would keep the memory of the whole

    def bytes_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return the memory of the slice."""
        return in_memory_order(param, param)[self.start : self.stop].view(torch.uint8)


def cut(params: Sequence[Parameter], size: int) -> list[Slice]:
    """Cut the parameters, taken end to end, into `size` nearly equal parts."""
    edges = [0, *accumulate(param.numel() for param in params)]
    total = edges[-1]
    if total == 0:
        return []
    bounds = [0]
    for part in range(1, size):
        ideal = total * part // size
        index = bisect_right(edges, ideal) - 1  # the parameter in which the bound falls
        inside = (ideal - edges[index] + GRAIN // 2) // GRAIN * GRAIN
        bounds.append(min(edges[index] + inside, edges[index + 1]))
    bounds.append(total)
    slices = []
    for owner, (low, high) in enumerate(pairwise(bounds)):
        for param, (begin, end) in zip(params, pairwise(edges), strict=True):
            first, last = max(low, begin), min(high, end)
            if first < last:
                slices.append(Slice(param, first - begin, last - begin, owner))
    return slices


def deal_out(params: Sequence[Parameter], loads: list[int]) -> list[Slice]:
    """Give each parameter as a whole to a rank, the largest first, to the rank that has least.

    `loads` are the bytes that the ranks have already; they are updated.
    """
    slices = []
    for param in sorted(params, key=lambda param: -param.nbytes):
        if param.numel():
            owner = loads.index(min(loads))
            loads[owner] += param.nbytes
            slices.append(Slice(param, 0, param.numel(), owner))
    return slices


class Shards:
    """All slices of one optimizer's parameters.

    With `whole`, each parameter has one owner, else it may be cut anywhere.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], process_set: ProcessSet, whole: bool = False
    ) -> None:
        rank, ranks = process_set.rank(), process_set.ranks
        assert rank is not None
        assert ranks is not None
        self.rank, self.size = rank, len(ranks)
        self._ranks = ranks
        self._process_set = process_set
        # Each group is cut by itself, and each type in it. So adding a group moves nothing, and
        # ranks have equal parts of what takes much state and of what takes little.
        self.slices: list[Slice] = []
        loads = [0] * self.size
        for group in groups:
            alike: dict[Any, list[Parameter]] = {}
            for param in group["params"]:
                alike.setdefault((param.dtype, param.device), []).append(param)
            for params in alike.values():
                self.slices += deal_out(params, loads) if whole else cut(params, self.size)
        self.mine = {piece.param: piece for piece in self.slices if piece.owner == rank}
        self._params = list(dict.fromkeys(piece.param for piece in self.slices))
        self._addresses: list[int] = []
        self.views: dict[Parameter, torch.Tensor] = {}  # this rank's slices, which are updated
        self._large: list[tuple[torch.Tensor, int]] = []  # memory and owner
        self._small: dict[torch.device, list[list[torch.Tensor]]] = {}  # memory, by owner
        self.attach()

    def attach(self) -> None:
        """Make views of the parameters' memory as it is now: a user may have replaced it."""
        addresses = [param.data_ptr() for param in self._params]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        for param, piece in self.mine.items():
            view = piece.of(param)
            if param in self.views:
                self.views[param].data = view  # the same object: optimizer state is known by it
            else:
                self.views[param] = view
        self._large.clear()
        self._small.clear()
        for piece in self.slices:
            memory = piece.bytes_of(piece.param)
            if memory.numel() >= PACK_BELOW:
                self._large.append((memory, piece.owner))
            else:
                nothing: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
                self._small.setdefault(memory.device, nothing)[piece.owner].append(memory)

    def share(self, name: str) -> None:
        """Give every rank's slices to all. Large ones are sent and received in place."""
        number = set_id(self._process_set)
        requests = []
        for index, (memory, owner) in enumerate(self._large):
            root_rank = self._ranks[owner]
            sent = Collective(Kind.BROADCAST, f"{name}.{index}", number, root_rank=root_rank)
            requests.append(runtime.submit(sent, [memory], [memory], background=False))
        gathered = []
        for index, (device, by_owner) in enumerate(self._small.items()):
            mine = by_owner[self.rank]
            packed = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
            collective = Collective(Kind.ALLGATHER, f"{name}.small.{index}", number)
            gathered.append(runtime.submit(collective, [packed], background=False))
        for request in requests:
            request.wait()
        for request, by_owner in zip(gathered, self._small.values(), strict=True):
            (everything,) = request.wait()
            targets = [memory for memories in by_owner for memory in memories]
            parts = everything.split([memory.numel() for memory in targets])
            torch._foreach_copy_(targets, parts)
