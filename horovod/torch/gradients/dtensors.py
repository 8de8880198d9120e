"""DTensors: parameters of which each rank holds a part, as `fully_shard` of torch makes them.

Horovod works on the part that this rank holds, together with the ranks that hold the same part of
other copies of the model. `DistributedOptimizer` reduces `LocalShard`s in place of such parameters;
`broadcast_parameters` sends each part from the root's copy of the model to all others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from horovod.engine.wait_for_all import wait_for_all
from horovod.torch.gradients.buckets import Named
from horovod.torch.ops.broadcast import broadcast_async_
from horovod.torch.ops.handles import synchronize
from horovod.torch.ops.objects import allgather_object

Tensor = torch.Tensor
Part = tuple[tuple[str, int, int], ...]  # placement, number of parts and index; by mesh dimension


def is_dtensor(tensor: Any) -> bool:
    """Return whether this is a DTensor. Nothing is imported: none exists without its module."""
    for name in ("torch.distributed.tensor", "torch.distributed._tensor"):  # the latter: torch 2.4
        kind = getattr(sys.modules.get(name), "DTensor", None)
        if kind is not None:
            return isinstance(tensor, kind)
    return False


def local_part(tensor: Any) -> Tensor:
    """Return the memory that this rank has of a DTensor."""
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def part_of(tensor: Any) -> Part | None:
    """Return which part of a DTensor this rank holds: equal on ranks that hold the same elements.

    Returns None for other tensors.
    """
    if not is_dtensor(tensor):
        return None
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    return tuple(
        (str(placement), mesh.size(dim), coordinates[dim])
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )


class LocalShard(torch.nn.Parameter):
    """This rank's part of a DTensor parameter, as a parameter.

    Its gradient is always the same part of the gradient that the whole parameter has now.
    """

    _whole: Any

    @staticmethod
    def of(param: Any) -> LocalShard:
        """Return the part that this rank has of `param`, with the same memory."""
        shard = LocalShard(local_part(param).detach(), param.requires_grad)
        shard._whole = param
        return shard

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the whole parameter does: it may be frozen later."""
        return bool(self._whole.requires_grad)

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient."""
        gradient, param = self._whole.grad, self._whole
        if gradient is None:
            return None
        if gradient.placements != param.placements:
            raise ValueError(
                f"the gradient of a DTensor parameter is laid out as {gradient.placements}, the "
                f"parameter as {param.placements}: redistribute the gradient before step()"
            )
        return local_part(gradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        param = self._whole
        if gradient is not None:
            gradient = type(param.data).from_local(
                gradient,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        param.grad = gradient


def with_local_shards(
    named: list[Named], groups: list[list[Named]] | None
) -> tuple[list[Named], list[list[Named]] | None]:
    """Return parameters and groups with a `LocalShard` in place of each DTensor."""
    shards = {param: LocalShard.of(param) for _, param in named if is_dtensor(param)}
    if not shards:
        return named, groups

    def replaced(members: list[Named]) -> list[Named]:
        return [(name, shards.get(param, param)) for name, param in members]

    return replaced(named), groups and [replaced(group) for group in groups]


# -- broadcasting ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """What one rank holds of one DTensor."""

    mesh: tuple[int, ...]  # the ranks that hold the same copy of the model, as torch counts them
    part: Part
    shape: tuple[int, ...]  # of the part


def find_sources(name: str, holdings: Sequence[Holding], root_rank: int) -> dict[Part, int]:
    """Return which rank of the root's mesh sends each part, of parts that another rank needs.

    `holdings` has what each rank holds of the DTensor called `name`.
    """
    sources: dict[Part, int] = {}
    for rank, holding in enumerate(holdings):
        if holding.mesh == holdings[root_rank].mesh:
            sources.setdefault(holding.part, rank)
    for rank, holding in enumerate(holdings):
        source = sources.get(holding.part)
        if source is None or holdings[source].shape != holding.shape:
            raise ValueError(
                f"rank {rank} holds a part of {name!r} that no rank of the root's mesh holds: "
                f"shard the model in the same way in every copy"
            )
    needed = {holding.part for rank, holding in enumerate(holdings) if rank not in sources.values()}
    return {part: source for part, source in sources.items() if part in needed}


def broadcast_dtensors(named: Sequence[tuple[str, Any]], root_rank: int) -> None:
    """Overwrite every rank's part with that of the rank that holds it in the root's mesh."""
    if not named:
        return
    mine = [
        Holding(
            tuple(tensor.device_mesh.mesh.flatten().tolist()),
            part_of(tensor) or (),
            tuple(local_part(tensor).shape),
        )
        for _, tensor in named
    ]
    everyone = allgather_object(mine, "broadcast_parameters.holdings")
    columns = [[holdings[index] for holdings in everyone] for index in range(len(named))]
    plans = [
        find_sources(name, column, root_rank)
        for (name, _), column in zip(named, columns, strict=True)
    ]
    for (name, tensor), holding, column, sources in zip(named, mine, columns, plans, strict=True):
        local = local_part(tensor)
        handles = []
        for part, source in sources.items():
            here = part == holding.part
            buffer = local if here else local.new_empty(column[source].shape)
            handles.append(broadcast_async_(buffer, source, f"{name}.from.{source}"))
        wait_for_all(partial(synchronize, handle) for handle in handles)
