"""Submitting operations: what a binding asks for becomes a request in a process set's queue.

The part of the runtime that bindings use all the time. A tensor that is reduced again and again by
one name is recognised: its signature is computed once, and a `PreparedAllreduce` lets the next one
go without a request at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError, UndefinedOperationError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.channel import Channel
from horovod.engine.job import WORLD
from horovod.engine.prepared import PreparedAllreduce
from horovod.engine.request import Kind, Request, signature_of


class Submission(ABC):
    """Turns calls into requests. What it remembers of earlier ones is good for one job."""

    def __init__(self) -> None:
        self.prepared: dict[
            str | None, PreparedAllreduce
        ] = {}  # by the user's name; bindings look it up
        self._signatures: OrderedDict[tuple[Any, ...], tuple[str, bytes]] = OrderedDict()

    @abstractmethod
    def channel(self, set_id: int) -> Channel:
        """The operations of a set that this rank belongs to."""

    def _named(
        self,
        channel: Channel,
        kind: Kind,
        name: str | None,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        detail: Any = None,
        labels: Sequence[str] = (),
    ) -> tuple[str, bytes]:
        """The request's name on the wire and its signature, remembered for named requests."""
        if name is None:
            full = f"{kind.value}.{channel.auto_name(kind)}"
            return full, signature_of(kind, full, tensors, op, prescale, postscale, detail, labels)
        if len(tensors) == 1:
            tensor = tensors[0]
            key: tuple[Any, ...] = (
                kind,
                name,
                tensor.dtype,
                tensor.shape,
                tensor.device,
                op,
                prescale,
                postscale,
                detail,
                labels,
            )
        else:
            forms = tuple((t.dtype, t.shape, t.device) for t in tensors)
            key = (kind, name, forms, op, prescale, postscale, detail, labels)
        known = self._signatures.get(key)
        if known is None:
            full = f"{kind.value}.{name}"
            signature = signature_of(kind, full, tensors, op, prescale, postscale, detail, labels)
            known = full, signature
            if len(self._signatures) >= channel.group.config.cache_capacity:
                if not self._signatures:
                    return known
                self._signatures.popitem(last=False)
            self._signatures[key] = known
        return known

    def _submit(
        self,
        channel: Channel,
        request: Request,
        tensors: Sequence[torch.Tensor],
        background: bool,
        deferred: bool = False,
    ) -> Request:
        if tensors and not tensors[0].is_cpu:
            request.follow_stream()
            request.deferred = deferred or channel.group.config.enable_async_completion
        return channel.submit(request, background)

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        name: str | None,
        op: ReduceOp,
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
        if len(tensors) > 1:
            _check_one_device(tensors)
        full, signature = self._named(
            channel, Kind.ALLREDUCE, name, tensors, op, prescale, postscale, wire, labels
        )
        request = Request(
            channel,
            Kind.ALLREDUCE,
            full,
            signature,
            tensors,
            outputs,
            op,
            prescale,
            postscale,
            wire,
        )
        request.alone = alone
        request.labels = labels
        if request.plain and name is not None and not background:
            self._remember(request, name, process_set_id)
        return self._submit(channel, request, tensors, background, deferred)

    def allreduce_prepared(
        self, prepared: PreparedAllreduce, tensors: Sequence[torch.Tensor], background: bool
    ) -> Request:
        """Repeat it on tensors of the same shapes; the device completes it later."""
        request = prepared.request(tensors)
        request.waiting = not background
        return self._submit(prepared.channel, request, tensors, background, True)

    def _remember(self, request: Request, name: str, process_set_id: int) -> None:
        """The next tensor like this one, if it is waited for, may go without a request."""
        capacity = request.channel.group.config.cache_capacity
        if request.tensors[0].dtype.is_floating_point and len(self.prepared) < capacity:
            self.prepared[name] = PreparedAllreduce(request, process_set_id)

    def allgather(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        process_set_id: int = WORLD,
        background: bool = True,
        labels: tuple[str, ...] = (),
    ) -> Request:
        """Concatenate along the first dimension, which may differ between ranks."""
        channel = self.channel(process_set_id)
        _check_one_device(tensors)
        for tensor in tensors:
            if tensor.dim() == 0:
                raise UndefinedOperationError(
                    "allgather needs at least one dimension, got a scalar"
                )
        full, signature = self._named(channel, Kind.ALLGATHER, name, tensors, labels=labels)
        request = Request(channel, Kind.ALLGATHER, full, signature, tensors)
        request.labels = labels
        return self._submit(channel, request, tensors, background)

    def broadcast(
        self,
        tensor: torch.Tensor,
        output: torch.Tensor,
        root_rank: int,
        name: str | None,
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
        full, signature = self._named(
            channel, Kind.BROADCAST, name, [tensor], detail=root, labels=labels
        )
        request = Request(channel, Kind.BROADCAST, full, signature, [tensor], [output], detail=root)
        request.labels = labels
        return self._submit(channel, request, [tensor], background)

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None,
        name: str | None,
        process_set_id: int = WORLD,
        background: bool = True,
        labels: tuple[str, ...] = (),
    ) -> Request:
        """Send `splits[i]` rows to rank i of the set; without splits, equal shares."""
        channel = self.channel(process_set_id)
        rows = _check_splits(tensor, splits, channel.group.size)
        full, signature = self._named(channel, Kind.ALLTOALL, name, [tensor], labels=labels)
        request = Request(channel, Kind.ALLTOALL, full, signature, [tensor], detail=rows)
        request.labels = labels
        return self._submit(channel, request, [tensor], background)

    def reducescatter(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        op: ReduceOp,
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
        for tensor in tensors:
            if tensor.dim() == 0:
                raise ValueError("reducescatter needs at least one dimension, got a scalar")
        full, signature = self._named(
            channel, Kind.REDUCESCATTER, name, tensors, op, prescale, postscale, labels=labels
        )
        request = Request(
            channel, Kind.REDUCESCATTER, full, signature, tensors, (), op, prescale, postscale
        )
        request.labels = labels
        return self._submit(channel, request, tensors, background)

    def barrier(self, process_set_id: int = WORLD, background: bool = True) -> Request:
        """Finished once every rank of the set has called it."""
        channel = self.channel(process_set_id)
        full, signature = self._named(channel, Kind.BARRIER, "noname", ())
        return channel.submit(Request(channel, Kind.BARRIER, full, signature), background)

    def require_all(
        self, name: str, reason: str, process_set_id: int = WORLD, background: bool = True
    ) -> Request:
        """A barrier for what needs every rank: if one has joined, the call fails and its join too.

        `reason` tells people why nobody can stand in.
        """
        channel = self.channel(process_set_id)
        full, signature = self._named(channel, Kind.REQUIRE_ALL, name, (), detail=reason)
        request = Request(channel, Kind.REQUIRE_ALL, full, signature, detail=reason)
        return channel.submit(request, background)

    def join(self, background: bool = True) -> Request:
        """This rank is out of data; result: the last rank to join."""
        channel = self.channel(WORLD)
        full, signature = self._named(channel, Kind.JOIN, "noname", ())
        return channel.submit(Request(channel, Kind.JOIN, full, signature), background)


def check_scattered(op: ReduceOp) -> None:
    """Refuse what reducescatter cannot do, the way upstream's engine does."""
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise HorovodInternalError(f"reducescatter takes Sum or Average, not {op!r}")


def _check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) > 1:
        kinds = {tensor.device for tensor in tensors}
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise HorovodInternalError(f"the tensors of a group are on several devices: {names}")


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
