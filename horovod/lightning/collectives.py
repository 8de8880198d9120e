"""Offers the collectives that Lightning and torchmetrics expect, by means of Horovod's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
    """Return Horovod's operation for a name or an operation of torch.distributed."""
    if isinstance(reduce_op, ReduceOp):
        return reduce_op
    # str(torch.distributed.ReduceOp.SUM) is "RedOpType.SUM".
    name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        known = ", ".join(sorted(_OPERATIONS))
        raise ValueError(f"reduce_op={reduce_op!r} is not known: use one of {known}")
    return _OPERATIONS[name]


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """Leave inference mode, in which Lightning evaluates.

    Only a thread in inference mode may write to tensors that were made in it. The engine may reduce
    in a thread of its own, and it keeps tensors for the next time.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def to_ordinary_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor detached and contiguous, or a copy of it if it is an inference tensor."""
    tensor = tensor.detach()
    if tensor.is_inference():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


class StackedGather(torch.autograd.Function):
    """Stacks the tensors of all ranks; the gradient of a part is the sum of all ranks' gradients.

    That is what DDP's all_gather does. `hvd.allgather` averages gradients, as upstream's does.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, process_set: ProcessSet) -> Tensor:
        ctx.process_set = process_set
        return hvd.allgather(tensor.detach().unsqueeze(0), process_set=process_set)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = hvd.allreduce(gradient.contiguous(), op=Sum, process_set=ctx.process_set)
        return total[ctx.process_set.rank() or 0], None


class Collectives:
    """The collectives that a strategy offers to callbacks, loggers and programs."""

    process_set: ProcessSet
    world_size: int

    def barrier(self, name: str | None = None, *_: Any, **__: Any) -> None:
        """Wait until all ranks have called this; `name` is ignored."""
        if self.world_size > 1:
            with without_inference_mode():
                hvd.barrier(process_set=self.process_set)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on all ranks; `src` counts within the process set."""
        if self.world_size == 1:
            return obj
        root = (self.process_set.ranks or range(self.world_size))[src]
        with without_inference_mode():
            return hvd.broadcast_object(obj, root, "lightning.broadcast", self.process_set)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks along a new first dimension.

        Args:
            tensor: This rank's tensor; all ranks pass the same shape.
            group: None, or the world group of torch.distributed.
            sync_grads: Whether the result is differentiable; False by default.

        Returns:
            A tensor whose entry i is the tensor of rank i.

        Raises:
            ValueError: `group` is another group of torch.distributed.
        """
        self._refuse_foreign_group(group)
        if self.world_size == 1:
            return tensor.unsqueeze(0) if sync_grads else tensor.detach().unsqueeze(0)
        if not (sync_grads and torch.is_grad_enabled()):
            with without_inference_mode():
                mine = to_ordinary_tensor(tensor).unsqueeze(0)
                return hvd.allgather(mine, process_set=self.process_set).detach()
        gathered: Tensor = StackedGather.apply(tensor, self.process_set)  # type: ignore[no-untyped-call]
        return gathered

    def reduce_tensor(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a new tensor, reduced over all ranks; return other objects unchanged."""
        self._refuse_foreign_group(group)
        op = operation(reduce_op)
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        with without_inference_mode():
            source = to_ordinary_tensor(tensor)
            if source.dtype == torch.bool:
                source = source.to(torch.uint8)
            return hvd.allreduce(source, op=op, process_set=self.process_set).to(tensor.dtype)

    def _refuse_foreign_group(self, group: Any) -> None:
        """Refuse a group of torch.distributed, which Horovod does not use."""
        if group is not None and "WORLD" not in str(group):
            raise ValueError(
                f"group={group!r} is a group of torch.distributed; with strategy='horovod' use "
                f"HorovodStrategy(process_set=...), or hvd's own collectives with process_set="
            )


def connect_metrics(module: torch.nn.Module, strategy: Any) -> Callable[[], None]:
    """Let the metrics in `module` gather by Horovod, and return a function that undoes this.

    Lightning's users log objects of torchmetrics, which gather over torch.distributed where that is
    initialised. With Horovod it is not, so each rank's metrics would cover only its own data.
    """
    torchmetrics = sys.modules.get("torchmetrics")  # Lightning imports it
    if torchmetrics is None or strategy.world_size == 1:
        return lambda: None
    default = sys.modules["torchmetrics.metric"].jit_distributed_available
    metrics: list[Any] = [
        each
        for each in module.modules()
        if isinstance(each, torchmetrics.Metric)
        and each.dist_sync_fn is None
        and each.distributed_available_fn is default
    ]

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        return _gather_values(value, strategy.process_set)

    for metric in metrics:
        metric.dist_sync_fn = gather
        metric.distributed_available_fn = lambda: True

    def disconnect() -> None:
        for metric in metrics:
            metric.dist_sync_fn = None
            metric.distributed_available_fn = default

    return disconnect


def _gather_values(value: Tensor, process_set: Any) -> list[Tensor]:
    """Gather the tensors of all ranks, whose shapes may differ."""
    with without_inference_mode():
        shapes = hvd.allgather_object(tuple(value.shape), "lightning.metric", process_set)
        flat = hvd.allgather(to_ordinary_tensor(value).view(-1), process_set=process_set)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = flat.split_with_sizes(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
