"""The short way: an allreduce of tensors like those before, without working it all out again.

If the caller waits and nothing else is in the way, it needs no request and runs *inline*, in the
caller's thread. Made by `runtime.prepare`; the runtime, the gradient reducer and JAX's programs
keep them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from horovod.engine.channel import Channel
from horovod.engine.execution import capture
from horovod.engine.execution.scaling import sum_and_scale
from horovod.engine.request import Request, bytes_on_wire
from horovod.transport.base import MAX_TENSORS
from horovod.transport.device.process_group import DeviceTransport


class PreparedAllreduce:
    """An allreduce of floating-point tensors that is repeated under one name.

    Keeps what a request would have to find out each time. `reduce` is for one tensor. For a group,
    the caller itself must check that the tensors are like those of the first request.
    """

    def __init__(self, request: Request, channel: Channel) -> None:
        self.channel = channel
        self.device = request.tensors[0].device
        self.is_on_cpu = request.tensors[0].is_cpu
        self.waits = not channel.group.config.enable_async_completion  # whether to await devices
        self.set_id = channel.set_id
        self.dtype = request.tensors[0].dtype
        self.shapes = [tensor.shape for tensor in request.tensors]
        self.nbytes = sum(tensor.nbytes for tensor in request.tensors)
        self.name = request.name
        self.signature = request.signature
        self.collective = request.collective
        self.op, _, self.postscale_factor, self.wire = request.reduction
        self.saved = self.nbytes - bytes_on_wire(self.nbytes, self.dtype, self.wire)
        self.is_exclusive = request.is_exclusive
        self.plain, self.scale = sum_and_scale(request.reduction, channel.group.size)

    def reduce(
        self, tensor: torch.Tensor, op: int, postscale_factor: float, set_id: int | None
    ) -> bool:
        """Reduce `tensor` in place if it is like those before and nothing is in the way.

        Returns whether it was done; if not, nothing has changed.
        """
        if (
            tensor.shape != self.shapes[0]
            or tensor.dtype is not self.dtype
            or op != self.op
            or postscale_factor != self.postscale_factor
            or set_id != self.set_id
            or tensor.is_cpu != self.is_on_cpu
            or tensor.requires_grad
            or tensor.is_neg()
            or not tensor.is_contiguous()
        ):
            return False
        vector = [tensor if tensor.dim() == 1 else tensor.view(-1)]
        if self.is_on_cpu:
            return self.allreduce_inline(vector)
        if tensor.device != self.device:
            return False
        transport = self.channel.transport_on(self.device)
        if transport is None or not self.allreduce_inline(vector, transport):
            return False
        if self.waits:
            began = time.monotonic()
            transport.await_stream()
            self.channel.observer.reduced(began)
        return True

    def allreduce_inline(
        self, vector: Sequence[torch.Tensor], on_device: DeviceTransport | None = None
    ) -> bool:
        """Reduce tensors in place, if nothing else is in the way; return whether that was so.

        This does what a round does, without a request: for a blocking call with an empty queue. If
        the other ranks turn out to run something else, it becomes a request after all. Tensors
        `on_device` are reduced in the current stream, and not waited for.
        """
        channel = self.channel
        queue, observer, transport = channel.queue, channel.observer, channel.transport
        if queue.requests or queue.failure is not None or observer.is_watching():
            return False
        if capture.active is not None or (on_device is not None and capture.is_captured(vector[0])):
            return False
        if len(vector) > 1 and not (transport.vectored and len(vector) <= MAX_TENSORS):
            return False
        if not channel.driving.acquire(blocking=False):
            return False
        try:
            began = time.monotonic()
            channel.inline = self.name, began, sys._getframe(2)
            if transport.agree(self.signature, vector if on_device is None else None):
                met = time.monotonic()
                if on_device is not None:
                    on_device.allreduce_one(vector[0], self.plain, self.scale, self.waits)
                else:
                    transport.allreduce_vector(vector, self.plain, self.scale, self.wire)
                channel.rounds.num_run += 1
                observer.reduced_inline(began, met, self.nbytes, self.saved, on_device is not None)
                return True
            observer.waited(began)
            channel.inline = None
            request = self._request(vector)
            request.follow_stream()
            queue.put_first(request)
            channel.rounds.settle()
        except BaseException as error:
            failure = channel.fail(error)
            if isinstance(error, Exception):
                raise failure from error
            raise
        finally:
            channel.inline = None
            channel.driving.release()
            if channel.waiters.number:
                channel.waiters.tell()
        request.wait()
        return True

    def start(self, tensors: Sequence[torch.Tensor], background: bool) -> Request:
        """Submit a request for the same allreduce; a device completes it later.

        `background` false promises that the caller waits at once.
        """
        request = self._request(tensors, waiting=not background)
        if not tensors[0].is_cpu:
            request.follow_stream()
            request.deferred = True
        return self.channel.submit(request, background)

    def _request(self, vector: Sequence[torch.Tensor], waiting: bool = True) -> Request:
        """Return an ordinary request for the same allreduce."""
        tensors = vector
        if len(vector) == 1:  # the only one that comes flat
            tensors = [vector[0].view(self.shapes[0])]
        return Request(
            self.channel,
            self.collective,
            self.name,
            self.signature,
            tensors,
            tensors,
            is_exclusive=self.is_exclusive,
            waiting=waiting,
            nbytes=self.nbytes,
        )
