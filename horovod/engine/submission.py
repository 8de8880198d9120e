"""Submitting operations: what a binding asks for becomes a request in a process set's queue.

The part of the runtime that bindings use all the time, and their only way to an operation. A tensor
that is reduced again and again by one name is recognised: its signature is computed once, and a
`PreparedAllreduce` lets the next one go without a request at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError, UndefinedOperationError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.capture import show
from horovod.engine.channel import Channel
from horovod.engine.job import WORLD
from horovod.engine.prepared import PreparedAllreduce
from horovod.engine.request import Kind, Request, signature_of


class Submission(ABC):
    """Turns calls into requests. What it remembers of earlier ones is good for one job."""

    def __init__(self) -> None:
        # By the user's name; bindings look there before they call `allreduce`.
        self.prepared: dict[str | None, PreparedAllreduce] = {}
        self._signatures: OrderedDict[tuple[Any, ...], tuple[str, bytes]] = OrderedDict()

    @abstractmethod
    def channel(self, set_id: int) -> Channel:
        """The operations of a set that this rank belongs to."""

    def _request(
        self,
        channel: Channel,
        kind: Kind,
        name: str | None,
        tensors: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        detail: Any = None,
        labels: tuple[str, ...] = (),
    ) -> Request:
        """One whose name on the wire and signature are remembered, if it is named."""
        terms = op, prescale, postscale, detail, labels
        if name is None:
            full = f"{kind.value}.{channel.queue.auto_name(kind)}"
            signature = signature_of(kind, full, tensors, *terms)
        else:
            if len(tensors) == 1:
                form: Any = tensors[0].dtype, tensors[0].shape, tensors[0].device
            else:
                form = tuple((tensor.dtype, tensor.shape, tensor.device) for tensor in tensors)
            known = self._signatures.get((kind, name, form, terms))
            if known is None:
                full = f"{kind.value}.{name}"
                known = full, signature_of(kind, full, tensors, *terms)
                capacity = channel.group.config.cache_capacity
                if self._signatures and len(self._signatures) >= capacity:
                    self._signatures.popitem(last=False)
                if capacity > 0:
                    self._signatures[kind, name, form, terms] = known
            full, signature = known
        return Request(channel, kind, full, signature, tensors, outputs, *terms)

    def _submit(
        self, channel: Channel, request: Request, background: bool, deferred: bool = False
    ) -> Request:
        captured = show(request, channel.set_id, channel.group.size)
        if captured is not None:
            return captured
        if request.tensors and not request.tensors[0].is_cpu:
            request.follow_stream()
            request.deferred = deferred or channel.group.config.enable_async_completion
        return channel.submit(request, background)

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        name: str | None,
        op: ReduceOp,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set_id: int = WORLD,
        background: bool = True,
        deferred: bool = False,
        wire: torch.dtype | None = None,
        alone: bool = False,
        labels: tuple[str, ...] = (),
    ) -> Request:
        """Reduce one tensor, or a group that runs together. `outputs` may be `tensors`.

        `background` false promises that the caller waits at once, which saves waking a thread.
        With `deferred` waiting is for the device: the caller goes on while it works. `wire` is the
        type in which the tensors travel between hosts, if that is to be a narrower one. With
        `alone` it is not fused with other requests, and does not wait for them to complete.
        `labels` are what the user calls the tensors: ranks must agree on them, and are told by
        them where they differ. They go with the other operations too.
        """
        channel = self.channel(process_set_id)
        _check_one_device(tensors)
        terms = op, prescale, postscale, wire, labels
        request = self._request(channel, Kind.ALLREDUCE, name, tensors, outputs, *terms)
        request.alone = alone
        if (
            (request.plain or _is_plain_on_device(request))
            and name is not None
            and not background
            and len(self.prepared) < channel.group.config.cache_capacity
        ):
            prepared = self.prepare(request, process_set_id)
            if prepared is not None:
                self.prepared[name] = prepared
        return self._submit(channel, request, background, deferred)

    def prepare(self, request: Request, process_set_id: int = WORLD) -> PreparedAllreduce | None:
        """For repeating a named allreduce; None where that is not one collective of a transport.

        It is good until the job ends or the set is removed, and then refuses. Ranks that go inline
        must do what others do who go by requests: those are cut by the fusion threshold.
        """
        channel, tensors = self.channel(process_set_id), request.tensors
        dtype = tensors[0].dtype
        if request.prescale != 1.0 or request.op is ReduceOp.ADASUM or not dtype.is_floating_point:
            return None
        if len(tensors) > 1:
            if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
                return None
            if sum(tensor.nbytes for tensor in tensors) > channel.group.config.fusion_threshold:
                return None
        return PreparedAllreduce(request, channel)

    def allgather(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        *,
        process_set_id: int = WORLD,
        background: bool = True,
        labels: tuple[str, ...] = (),
    ) -> Request:
        """Concatenate along the first dimension, which may differ between ranks."""
        channel = self.channel(process_set_id)
        _check_one_device(tensors)
        if any(tensor.dim() == 0 for tensor in tensors):
            raise UndefinedOperationError("allgather needs at least one dimension, got a scalar")
        request = self._request(channel, Kind.ALLGATHER, name, tensors, labels=labels)
        return self._submit(channel, request, background)

    def broadcast(
        self,
        tensor: torch.Tensor,
        output: torch.Tensor,
        root_rank: int,
        name: str | None,
        *,
        process_set_id: int = WORLD,
        background: bool = True,
        labels: tuple[str, ...] = (),
    ) -> Request:
        """Copy the root's tensor to all; `root_rank` is a rank of the world."""
        channel = self.channel(process_set_id)
        ranks = channel.group.global_ranks
        if root_rank not in ranks:
            raise ValueError(
                f"root rank {root_rank} is not in the process set, whose ranks are {list(ranks)}"
            )
        root = ranks.index(root_rank)
        request = self._request(
            channel, Kind.BROADCAST, name, [tensor], [output], detail=root, labels=labels
        )
        return self._submit(channel, request, background)

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None,
        name: str | None,
        *,
        process_set_id: int = WORLD,
        background: bool = True,
        labels: tuple[str, ...] = (),
    ) -> Request:
        """Send `splits[i]` rows to rank i of the set; without splits, equal shares."""
        channel = self.channel(process_set_id)
        rows = _check_splits(tensor, splits, channel.group.size)
        request = self._request(channel, Kind.ALLTOALL, name, [tensor], labels=labels)
        request.detail = rows  # which may differ between ranks
        return self._submit(channel, request, background)

    def reducescatter(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        op: ReduceOp,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set_id: int = WORLD,
        background: bool = True,
        labels: tuple[str, ...] = (),
    ) -> Request:
        """Reduce, and leave each rank its share of the rows."""
        channel = self.channel(process_set_id)
        _check_one_device(tensors)
        check_scattered(op)
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ValueError("reducescatter needs at least one dimension, got a scalar")
        request = self._request(
            channel, Kind.REDUCESCATTER, name, tensors, (), op, prescale, postscale, labels=labels
        )
        return self._submit(channel, request, background)

    def barrier(self, process_set_id: int = WORLD, background: bool = True) -> Request:
        """Finished once every rank of the set has called it."""
        channel = self.channel(process_set_id)
        return channel.submit(self._request(channel, Kind.BARRIER, "noname"), background)

    def require_all(
        self, name: str, reason: str, process_set_id: int = WORLD, background: bool = True
    ) -> Request:
        """A barrier for what needs every rank: if one has joined, the call fails and its join too.

        `reason` tells people why nobody can stand in.
        """
        channel = self.channel(process_set_id)
        request = self._request(channel, Kind.REQUIRE_ALL, name, detail=reason)
        return channel.submit(request, background)

    def join(self, background: bool = True) -> Request:
        """This rank is out of data; result: the last rank to join."""
        channel = self.channel(WORLD)
        return channel.submit(self._request(channel, Kind.JOIN, "noname"), background)


def _is_plain_on_device(request: Request) -> bool:
    """Whether it is one tensor on a device, to be reduced in place."""
    tensors = request.tensors
    return (
        len(tensors) == 1
        and not tensors[0].is_cpu
        and tensors is request.outputs
        and request.prescale == 1.0
        and request.op is not ReduceOp.ADASUM
    )


def check_scattered(op: ReduceOp) -> None:
    """Refuse what reducescatter cannot do, the way upstream's engine does."""
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise HorovodInternalError(f"reducescatter takes Sum or Average, not {op!r}")


def _check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) > 1:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise HorovodInternalError(
                f"the tensors of a group must be on one device; these are on {names}"
            )


def _check_splits(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    if tensor.dim() == 0:
        raise UndefinedOperationError("alltoall needs at least one dimension, got a scalar")
    rows = tensor.shape[0]
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(
                f"alltoall without splits needs a first dimension divisible by {size}, got {rows}"
            )
        return [rows // size] * size
    if len(splits) != size:
        raise ValueError(f"alltoall needs one split for each of {size} ranks, got {len(splits)}")
    if min(splits) < 0:
        raise ValueError(f"alltoall splits must not be negative: {list(splits)}")
    if sum(splits) > rows:
        raise ValueError(f"alltoall splits sum up to {sum(splits)}, but there are {rows} rows")
    return list(splits)
