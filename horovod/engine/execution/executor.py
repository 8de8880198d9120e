"""Running agreed batches over transports. Called by a channel, in one thread at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Kind, Reduction
from horovod.engine.execution.adasum import adasum_
from horovod.engine.execution.batches import Batch
from horovod.engine.execution.lane import open_transport, stand_in
from horovod.engine.execution.scaling import finish_, is_inexact, scale_, sum_and_scale
from horovod.engine.request import Request
from horovod.observe.observer import Observer
from horovod.transport.base import DEVICE, MAX_TENSORS, Transport
from horovod.transport.device.process_group import DeviceTransport

DeviceTransports = Callable[[torch.device, str], Transport]  # the text: a lane's name, or none


class Executor:
    """Does the collectives of one process set and completes the requests."""

    def __init__(
        self,
        transport: Transport,
        for_device: DeviceTransports,
        observer: Observer,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.observer = observer
        self._hosts = hosts  # the ranks on each
        self.transport = transport
        self._for_device = for_device
        self._device_transports: dict[torch.device, Transport] = {}
        self._lanes: dict[str, DeviceTransport] = {}
        self._streams: dict[torch.device, Any] = {}
        self._buffers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self.on_device_failure: Callable[[HorovodInternalError], object] | None = None
        self.rank = transport.rank
        self.size = transport.size

    def close(self) -> None:
        self.on_device_failure = None
        for transport in self._transports():
            if isinstance(transport, DeviceTransport):
                transport.on_failure = None  # a cycle, which would keep the memory for a while
            transport.close()

    def abort(self, reason: str) -> None:
        for transport in self._transports():
            transport.abort(reason)

    def after_fork_in_child(self) -> None:
        for transport in self._transports():
            transport.after_fork_in_child()

    def _transports(self) -> list[Transport]:
        devices = list(self._device_transports.values())
        return [*list(self._lanes.values()), *devices, self.transport]

    def check_devices(self) -> None:
        """Raise if a device's work was ended in the middle: see `DeviceTransport.interrupted`."""
        for transport in self._transports():
            if isinstance(transport, DeviceTransport) and transport.interrupted:
                transport.check_usable()

    # -- lanes -----------------------------------------------------------------------------

    def open_lane(self, name: str, device: torch.device) -> DeviceTransport | None:
        """Connect a lane (see `lane`); None where host memory serves. Collective."""
        transport = open_transport(self._for_device, device, name)
        if transport is not None:
            self._lanes[name] = transport
            transport.on_failure = self.on_device_failure
        return transport

    def close_lane(self, name: str) -> None:
        transport = self._lanes.pop(name, None)
        if transport is not None:
            transport.close()

    def transport_on(self, device: torch.device) -> DeviceTransport | None:
        """Return the device's own transport, if it has one and the device has been used before."""
        transport = self._device_transports.get(device)
        return transport if isinstance(transport, DeviceTransport) else None

    def media(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return what carries such tensors, once one has been reduced."""
        if tensor.is_cpu:
            return self.transport.media
        transport = self._device_transports.get(tensor.device)
        return () if transport is None else transport.media

    # -- packing ---------------------------------------------------------------------------

    def pack(self, batch: Batch, transport: Transport) -> list[torch.Tensor]:
        """Bring a batch's input into the tensors that will be reduced.

        One tensor is reduced where it is, and so are several if the transport can reduce them
        together; the others are copied into a fusion buffer.
        """
        if batch.vector is not None:
            return batch.vector
        count, most = len(batch.inputs), MAX_TENSORS if transport.vectored else 1
        direct = count if count <= most else most - 1
        vector = batch.outputs[:direct]
        if batch.inputs is not batch.outputs:
            for source, target in zip(batch.inputs[:direct], vector, strict=True):
                if source is not target:
                    target.copy_(source)
        if count == 1:
            vector = [vector[0].view(-1)]
        batch.fused = range(direct, count)
        if batch.fused:
            sources = [batch.inputs[index].view(-1) for index in batch.fused]
            vector.append(self._fusion_buffer(sources))
            with self.observer.activity(batch.request.name, "MEMCPY_IN_FUSION_BUFFER"):
                torch.cat(sources, out=vector[-1])
        prescale_factor = batch.request.reduction.prescale_factor
        if prescale_factor != 1.0:
            for tensor in vector:
                scale_(tensor, prescale_factor)
        batch.vector = vector
        return vector

    def unpack(self, batch: Batch) -> None:
        """Bring results out of the fusion buffer."""
        if batch.vector and batch.fused:
            outputs = [batch.outputs[index].view(-1) for index in batch.fused]
            with self.observer.activity(batch.request.name, "MEMCPY_OUT_FUSION_BUFFER"):
                sizes = [output.numel() for output in outputs]
                parts = torch.split_with_sizes(batch.vector[-1], sizes)
                torch._foreach_copy_(outputs, list(parts))

    def preload(self, batch: Batch) -> list[torch.Tensor] | None:
        """Return what may be sent along with the agreement, without changing a caller's tensor."""
        reduction = batch.request.reduction
        if batch.request.kind is not Kind.ALLREDUCE or reduction.op is ReduceOp.ADASUM:
            return None
        if not batch.inputs or not batch.inputs[0].is_cpu or reduction.prescale_factor != 1.0:
            return None
        return self.pack(batch, self.transport)

    def _fusion_buffer(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        count = sum(tensor.numel() for tensor in tensors)
        key = (tensors[0].dtype, tensors[0].device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count, dtype=key[0], device=key[1])
            self._buffers[key] = buffer
        return buffer[:count]

    # -- running ---------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Send the first part of what `run`, which must come next, sends: the link does not rest.

        Where the transport has nothing to send without waiting, nothing happens.
        """
        reduction, transport = batch.request.reduction, self.transport
        if not transport.sends_ahead or reduction.op is ReduceOp.ADASUM or not batch.inputs:
            return
        if batch.inputs[0].is_cpu and is_inexact(batch.inputs[0]):
            vector = self.pack(batch, transport)
            plain, scale = sum_and_scale(reduction, self.size)
            transport.begin_allreduce(vector, plain, scale, reduction.wire)
            batch.begun = True

    def run(self, batch: Batch) -> Any:
        """Do the batch's collective; return the result, unless it is in the requests' outputs."""
        request = batch.request
        if request.kind in _AGREEMENTS:  # done, as all ranks have agreed to run it,
            if request.kind is Kind.CONFIRM and request.driver is None:  # unless we have joined
                assert request.collective.plan is not None
                stand_in(self._lanes[request.name.partition(".")[2]], request.collective.plan)
            return None
        if not request.tensors:
            return []
        requests = list(batch.requests) or [request]
        with self._on_device(request.tensors[0].device, requests) as transport:
            if request.kind is Kind.ALLREDUCE:
                return self._reduce_batch(batch, request, transport)
            with self.observer.activity(request.name, f"{transport.name}_{request.kind.name}"):
                result = _RUN[request.kind](self, request, transport)
            _hand_over(result, request.stream)
            return result

    def _reduce_batch(self, batch: Batch, request: Request, transport: Transport) -> None:
        if request.reduction.op is ReduceOp.ADASUM:
            self._adasum(batch, transport)
            return
        vector = self.pack(batch, transport)
        with self.observer.activity(batch.request.name, f"{transport.name}_ALLREDUCE"):
            if batch.begun:
                transport.finish_allreduce()
            else:
                reduce_(vector, request.reduction, transport)
        self.unpack(batch)

    def _adasum(self, batch: Batch, transport: Transport) -> None:
        outputs = []
        reduction = batch.request.reduction
        for source, target in zip(batch.inputs, batch.outputs, strict=True):
            if source is not target:
                target.copy_(source)
            outputs.append(target.view(-1))
            scale_(outputs[-1], reduction.prescale_factor)
        with self.observer.activity(batch.request.name, f"{transport.name}_ADASUM_ALLREDUCE"):
            adasum_(outputs, transport, self._hosts if outputs[0].is_cuda else None)
        for output in outputs:
            scale_(output, reduction.postscale_factor)

    def _broadcast(self, request: Request, transport: Transport) -> torch.Tensor:
        source, target = request.tensors[0], request.outputs[0]
        assert request.collective.root_rank is not None
        root = transport.group.global_ranks.index(request.collective.root_rank)
        if source is not target and self.rank == root:
            target.copy_(source)
        transport.broadcast(target.view(-1), root)
        return target

    def _allgather(self, request: Request, transport: Transport) -> list[torch.Tensor]:
        rows = self.gather_numbers([tensor.shape[0] for tensor in request.tensors])
        results = []
        for index, tensor in enumerate(request.tensors):
            row = math.prod(tensor.shape[1:])
            counts = [ranks_rows[index] * row for ranks_rows in rows]
            total = sum(ranks_rows[index] for ranks_rows in rows)
            output = tensor.new_empty((total, *tensor.shape[1:]))
            transport.allgather(tensor.reshape(-1), output.view(-1), counts)
            results.append(output)
        return results

    def _alltoall(self, request: Request, transport: Transport) -> tuple[torch.Tensor, list[int]]:
        tensor, splits = request.tensors[0], request.collective.splits
        assert splits is not None  # equal ones were made where none were given
        everyone = self.gather_numbers(splits)
        received = [ranks_splits[self.rank] for ranks_splits in everyone]
        row = math.prod(tensor.shape[1:])
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        source = tensor.reshape(-1)[: sum(splits) * row]
        transport.alltoall(
            source, output.view(-1), [n * row for n in splits], [n * row for n in received]
        )
        return output, received

    def _reducescatter(self, request: Request, transport: Transport) -> list[torch.Tensor]:
        reduction = request.reduction
        plain, _ = sum_and_scale(reduction, self.size)
        results = []
        for tensor in request.tensors:
            row = math.prod(tensor.shape[1:])
            each, extra = divmod(tensor.shape[0], self.size)
            rows = [each + (rank < extra) for rank in range(self.size)]
            output = tensor.new_empty((rows[self.rank], *tensor.shape[1:]))
            source = tensor.reshape(-1).clone()
            scale_(source, reduction.prescale_factor)
            transport.reduce_scatter(source, output.view(-1), [n * row for n in rows], plain)
            finish_(output, reduction, self.size)
            results.append(output)
        return results

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return each rank's list of integers; all have equally many."""
        source = torch.tensor(numbers, dtype=torch.int64)
        output = torch.empty(len(numbers) * self.size, dtype=torch.int64)
        self.transport.allgather(source, output, [len(numbers)] * self.size)
        result: list[list[int]] = output.view(self.size, len(numbers)).tolist()
        return result

    # -- devices ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on_device(self, device: torch.device, requests: Sequence[Request]) -> Iterator[Transport]:
        """Yield the transport for `device`, in a stream of ours that runs after the callers' work.

        On leaving, the host has waited for the device, so a finished handle means finished work;
        unless all callers want an event instead (`Request.deferred`).
        """
        if device.type == "cpu":
            yield self.transport
            return
        module = torch.get_device_module(device)
        transport = self._device_transports.get(device)
        if transport is None:
            with self.observer.activity(requests[0].name, f"INIT_{device.type.upper()}"):
                transport = self._device_transports[device] = self._for_device(device, "")
            if isinstance(transport, DeviceTransport):
                transport.on_failure = self.on_device_failure
            self._streams[device] = module.Stream(device)
        stream = self._streams[device]
        with module.stream(stream):  # which makes its device the current one, too
            for request in requests:
                if request.event is not None:
                    stream.wait_event(request.event)
            if not all(request.deferred for request in requests):
                yield transport
                stream.synchronize()
                transport.check_usable()  # raises if the device has given up in the middle
                return
            # A transport that goes through host memory does all of it here, in the host's time.
            timing = None
            if DEVICE in transport.media:
                timing = self.observer.begin_on_device(device, stream)
            yield transport
            if timing is not None:
                ready = self.observer.end_on_device(timing, stream)
            else:
                ready = module.Event()
                ready.record(stream)
            for request in requests:
                request.ready, request.timing = ready, timing


_AGREEMENTS = (Kind.BARRIER, Kind.CONFIRM)

_RUN: dict[Kind, Callable[[Executor, Request, Transport], Any]] = {
    Kind.BROADCAST: Executor._broadcast,
    Kind.ALLGATHER: Executor._allgather,
    Kind.ALLTOALL: Executor._alltoall,
    Kind.REDUCESCATTER: Executor._reducescatter,
}


def reduce_(vector: Sequence[torch.Tensor], reduction: Reduction, transport: Transport) -> None:
    """Reduce flat tensors in place, with average and post-scale factor."""
    plain, scale = sum_and_scale(reduction, transport.size)
    if is_inexact(vector[0]):
        transport.allreduce_vector(vector, plain, scale, reduction.wire)
    else:
        transport.allreduce_vector(vector, plain)
        for tensor in vector:
            finish_(tensor, reduction, transport.size)


def _hand_over(result: Any, stream: Any) -> None:
    """Keep the memory of new tensors from being used again before the caller's stream is done."""
    for tensor in result if isinstance(result, (list, tuple)) else (result,):
        if stream is not None and isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
            tensor.record_stream(stream)
