"""Lightning's collectives, made of Horovod's. Mixed into the strategies for Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import horovod.torch as hvd
from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Average, Max, Min, Product, ReduceOp, Sum

Tensor = torch.Tensor

_OPERATIONS = {
    "mean": Average,
    "avg": Average,
    "sum": Sum,
    "min": Min,
    "max": Max,
    "product": Product,
    "prod": Product,
}


def operation(reduce_op: Any) -> ReduceOp:
    """The operation that is meant by a name, one of torch.distributed's or one of Horovod's."""
    if isinstance(reduce_op, ReduceOp):
        return reduce_op
    # torch.distributed.ReduceOp.SUM and its like have "RedOpType.SUM" for a text.
    name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        known = ", ".join(sorted(_OPERATIONS))
        raise ValueError(f"reduce_op={reduce_op!r} is not known: use one of {known}")
    return _OPERATIONS[name]


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make no inference tensors, in which Lightning evaluates: only this thread could write them.

    The engine reduces in another thread if that comes first, and keeps tensors for the next time.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and without a history, for `ordinary_tensors`."""
    tensor = tensor.detach()
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        if tensor.is_inference()
        else (tensor.contiguous())
    )


class Gathered(torch.autograd.Function):
    """Everybody's tensor, stacked. The gradient of a part is the sum over all ranks that used it.

    That is what DDP's all_gather does, while `hvd.allgather` averages, as upstream's does.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_set: ProcessSet) -> Tensor:
        ctx.process_set = process_set
        return hvd.allgather(tensor.detach().unsqueeze(0), process_set=process_set)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        added = hvd.allreduce(gradient.contiguous(), op=Sum, process_set=ctx.process_set)
        place = ctx.process_set.rank()
        return added[0 if place is None else place], None


class Collectives:
    """What a strategy offers to callbacks, loggers and programs."""

    process_set: ProcessSet
    world_size: int

    def barrier(self, name: str | None = None, *_: Any, **__: Any) -> None:
        """Wait until all ranks are here."""
        if self.world_size > 1:
            with ordinary_tensors():
                hvd.barrier(process_set=self.process_set)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src` (of the process set, if there is one) on all ranks."""
        if self.world_size == 1:
            return obj
        root = (self.process_set.ranks or range(self.world_size))[src]
        with ordinary_tensors():
            return hvd.broadcast_object(obj, root, "lightning.broadcast", self.process_set)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Everybody's tensor, along a new first dimension; differentiable with `sync_grads`."""
        self._only_own(group)
        if self.world_size == 1:
            return tensor.unsqueeze(0) if sync_grads else tensor.detach().unsqueeze(0)
        if not (sync_grads and torch.is_grad_enabled()):
            with ordinary_tensors():
                mine = ordinary(tensor).unsqueeze(0)
                return hvd.allgather(mine, process_set=self.process_set).detach()
        gathered: Tensor = Gathered.apply(tensor, self.process_set)  # type: ignore[no-untyped-call]
        return gathered

    def reduced(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A new tensor, reduced over all ranks; what is no tensor comes back as it is."""
        self._only_own(group)
        op = operation(reduce_op)
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        with ordinary_tensors():
            source = ordinary(tensor)
            if source.dtype == torch.bool:
                source = source.to(torch.uint8)
            return hvd.allreduce(source, op=op, process_set=self.process_set).to(tensor.dtype)

    def _only_own(self, group: Any) -> None:
        """`group` belongs to torch.distributed, which Horovod does not use."""
        if group is not None and "WORLD" not in str(group):
            raise ValueError(
                f"group={group!r} is a group of torch.distributed; with strategy='horovod' use "
                f"HorovodStrategy(process_set=...), or hvd's own collectives with process_set="
            )
