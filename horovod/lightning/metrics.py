"""Metrics of torchmetrics, gathered over the ranks by Horovod.

Lightning's users log objects of torchmetrics, which gather what they have counted through
torch.distributed where that is initialised. With Horovod it is not, and they would count each
rank's data alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import horovod.torch as hvd
from horovod.lightning.collectives import ordinary, ordinary_tensors

Tensor = torch.Tensor


def connect(module: torch.nn.Module, strategy: Any) -> Callable[[], None]:
    """Let the metrics in `module` gather by Horovod; the result undoes it."""
    torchmetrics = sys.modules.get("torchmetrics")  # Lightning imports it
    if torchmetrics is None or strategy.world_size == 1:
        return lambda: None
    found = [each for each in module.modules() if isinstance(each, torchmetrics.Metric)]
    usual = sys.modules["torchmetrics.metric"].jit_distributed_available
    chosen = [
        each
        for each in found
        if each.dist_sync_fn is None and each.distributed_available_fn is usual
    ]

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        return _everybodys(value, strategy.process_set)

    for metric in chosen:
        metric.dist_sync_fn = gather
        metric.distributed_available_fn = _always

    def disconnect() -> None:
        for metric in chosen:
            metric.dist_sync_fn = None
            metric.distributed_available_fn = usual

    return disconnect


def _always() -> bool:
    return True


def _everybodys(value: Tensor, process_set: Any) -> list[Tensor]:
    """The tensors of all ranks, whose shapes may differ."""
    with ordinary_tensors():
        shapes = hvd.allgather_object(tuple(value.shape), "lightning.metric", process_set)
        flat = hvd.allgather(ordinary(value).view(-1), process_set=process_set)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = flat.split_with_sizes(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
