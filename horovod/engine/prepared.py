"""The short way: a blocking allreduce of tensors like those before, without a request.

The runtime and the gradient reducer keep them; a channel runs them (`Channel.allreduce_inline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.engine.executor import sum_and_scale
from horovod.engine.request import Kind, Request, bytes_on_wire, caller


class InlineReduction(NamedTuple):
    """What the stall inspector sees of an inline reduction."""

    name: str
    submitted: float
    frame: FrameType

    @property
    def source(self) -> str:
        place, line = caller(self.frame)
        return f"{place}:{line}"


class PreparedAllreduce:
    """An allreduce of floating-point tensors that is repeated under one name.

    Keeps what a request would have to find out each time. `reduce` is for one tensor; whoever
    repeats that of a group checks itself that the tensors are like those of the first request.
    """

    __slots__ = (
        "alone",
        "channel",
        "dtype",
        "name",
        "nbytes",
        "op",
        "plain",
        "postscale",
        "saved",
        "scale",
        "set_id",
        "shapes",
        "signature",
        "wire",
    )

    def __init__(self, request: Request, set_id: int) -> None:
        self.channel = request.channel
        self.set_id = set_id
        self.dtype = request.tensors[0].dtype
        self.shapes = [tensor.shape for tensor in request.tensors]
        self.nbytes = sum(tensor.nbytes for tensor in request.tensors)
        self.name = request.name
        self.signature = request.signature
        self.op = request.op
        self.postscale = request.postscale
        self.wire = request.wire
        self.saved = self.nbytes - bytes_on_wire(self.nbytes, self.dtype, self.wire)
        self.alone = request.alone
        self.plain, self.scale = sum_and_scale(
            request.op, request.postscale, request.channel.group.size
        )

    def reduce(
        self, tensor: torch.Tensor, op: ReduceOp, postscale: float, set_id: int | None
    ) -> bool:
        """Reduce `tensor` in place if it is like those before and nothing is in the way.

        Whether it was done; if not, nothing was.
        """
        if (
            tensor.shape != self.shapes[0]
            or tensor.dtype is not self.dtype
            or op != self.op
            or postscale != self.postscale
            or set_id != self.set_id
            or not tensor.is_cpu
            or tensor.requires_grad
            or tensor.is_neg()
            or not tensor.is_contiguous()
        ):
            return False
        vector = [tensor if tensor.dim() == 1 else tensor.view(-1)]
        return self.channel.allreduce_inline(vector, self)

    def request(self, vector: Sequence[torch.Tensor]) -> Request:
        """An ordinary request for the same, whose caller waits."""
        tensors = vector
        if len(vector) == 1:  # the only one that comes flat
            tensors = [vector[0].view(self.shapes[0])]
        request = Request(
            self.channel,
            Kind.ALLREDUCE,
            self.name,
            self.signature,
            tensors,
            tensors,
            self.op,
            1.0,
            self.postscale,
            self.wire,
        )
        request.nbytes = self.nbytes
        request.alone = self.alone
        request.waiting = True
        return request
