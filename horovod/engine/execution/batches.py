"""Tensor fusion: from agreed requests to batches that one collective each will do.

Every rank computes the same batches from the same agreed requests. Allreduces that share dtype,
device, operator and scale factors go into one buffer up to the fusion threshold; others in between
do not end a batch, so mixed dtypes still fuse. Everything else is a batch of its own. Which
gradients an optimizer puts into one request is not decided here:
`horovod.torch.gradients.bucketing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from horovod.engine.collective import Kind
from horovod.engine.request import Request


@dataclass(slots=True, eq=False)
class Batch:
    """Tensors for one collective. `outputs` of an allreduce may be the very tensors of `inputs`."""

    request: Request  # any one of them: they are alike in all that matters
    requests: dict[Request, int] = field(default_factory=dict)  # and how many of their tensors
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0
    # Filled in when the data has been packed: what will be reduced, and which tensors of the
    # batch are in the last part of it, the fusion buffer.
    vector: list[torch.Tensor] | None = None
    fused: range = range(0)
    begun: bool = False  # whether its collective is under way, and has to be finished

    def add(self, request: Request, source: torch.Tensor, target: torch.Tensor) -> None:
        self.requests[request] = self.requests.get(request, 0) + 1
        self.inputs.append(source)
        self.outputs.append(target)
        self.nbytes += source.nbytes


def plan(requests: Sequence[Request], threshold: int, fuse_groups: bool) -> list[Batch]:
    """Return the batches for `requests`, in the order they will run."""
    if len(requests) == 1 and (len(requests[0].tensors) <= 1 or requests[0].nbytes <= threshold):
        return [_whole(requests[0])]
    batches: list[Batch] = []
    open_batches: dict[tuple[object, ...], Batch] = {}
    for request in requests:
        if request.kind is not Kind.ALLREDUCE:
            batches.append(Batch(request))
            continue
        if not fuse_groups or request.is_exclusive:
            open_batches.clear()
        for source, target in zip(request.tensors, request.outputs, strict=True):
            key = source.dtype, source.device, request.reduction
            batch = open_batches.get(key)
            if batch is None or batch.nbytes + source.nbytes > threshold:
                batch = open_batches[key] = Batch(request)
                batches.append(batch)
            batch.add(request, source, target)
        if request.is_exclusive:
            open_batches.clear()
    return batches


def before_join(requests: list[Request]) -> list[Request]:
    """Return the agreed requests before a join, which is settled and not run."""
    for index, request in enumerate(requests):
        if request.kind is Kind.JOIN:
            return requests[:index]
    return requests


def _whole(request: Request) -> Batch:
    batch = Batch(request)
    if request.kind is Kind.ALLREDUCE and request.tensors:
        batch.requests[request] = len(request.tensors)
        batch.inputs = batch.outputs = list(request.tensors)
        if request.outputs is not request.tensors:
            batch.outputs = list(request.outputs)
    return batch
