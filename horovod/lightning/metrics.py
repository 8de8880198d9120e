"""Lets metrics of torchmetrics gather their values over the ranks by Horovod.

Lightning's users log objects of torchmetrics. These gather over torch.distributed where that is
initialised. With Horovod it is not, so without this module each rank's metrics would cover only
the data of that rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import horovod.torch as hvd
from horovod.lightning.collectives import to_ordinary_tensor, without_inference_mode

Tensor = torch.Tensor


def connect(module: torch.nn.Module, strategy: Any) -> Callable[[], None]:
    """Let the metrics in `module` gather by Horovod, and return a function that undoes this."""
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
