"""Submitting operations: what a binding asks for becomes a request in a process set's queue.

This is the part of the runtime that bindings use all the time, and their only way to an operation.
A tensor that is reduced again and again under one name is recognised: its signature is computed
once, and a `PreparedAllreduce` lets the next one do without a request.
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
from horovod.engine.collective import WORLD, Collective, Kind, Reduction, signature_of
from horovod.engine.execution.capture import show
from horovod.engine.execution.prepared import PreparedAllreduce
from horovod.engine.request import Request
from horovod.transport.base import Group


class Submission(ABC):
    """Turns calls into requests. What it remembers of earlier ones is good for one job."""

    def __init__(self) -> None:
        # Allreduces by the user's name; bindings look here before they submit one.
        self.prepared: dict[str | None, PreparedAllreduce] = {}
        self._signatures: OrderedDict[tuple[Collective, Any], tuple[str, bytes]] = OrderedDict()

    @abstractmethod
    def channel(self, set_id: int) -> Channel:
        """Return the channel of a set that this rank belongs to."""

    def submit(
        self,
        collective: Collective,
        tensors: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        *,
        background: bool = True,
        deferred: bool = False,
        is_exclusive: bool = False,
    ) -> Request:
        """Queue a collective of this rank's tensors, to run when all ranks of its set have it.

        Args:
            collective: The operation. Several tensors of one collective run together, as a group.
            tensors: This rank's tensors, contiguous and all on one device. Allgather concatenates
                along the first dimension, reducescatter leaves each rank its share of the rows.
            outputs: Tensors for the results of allreduce and broadcast; they may be `tensors`.
            background: False promises that the caller waits at once, which saves waking a thread.
            deferred: Whether only the device waits for the result, while the caller goes on.
            is_exclusive: Whether to run it by itself, neither fused with other requests nor waiting
                for them.

        Returns:
            The request, which is the caller's handle to the result.

        Raises:
            ValueError: An argument does not fit the set or the tensors; nothing was queued.
        """
        channel = self.channel(collective.process_set_id)
        collective = _checked(collective, tensors, channel.group)
        name, signature = self._identify(channel, collective, tensors)
        request = Request(channel, collective, name, signature, tensors, outputs, is_exclusive)
        if not tensors:
            return channel.submit(request, background)
        if collective.kind is Kind.ALLREDUCE and not background and collective.name is not None:
            self._remember(request, channel)
        captured = show(request, channel.set_id, channel.group.size)
        if captured is not None:
            return captured
        if not tensors[0].is_cpu:
            request.follow_stream()
            request.deferred = deferred or channel.group.config.enable_async_completion
        return channel.submit(request, background)

    def barrier(self, process_set_id: int = WORLD, background: bool = True) -> Request:
        """Queue a barrier: it is finished once every rank of the set has called it."""
        collective = Collective(Kind.BARRIER, "noname", process_set_id)
        return self.submit(collective, background=background)

    def join(self, background: bool = True) -> Request:
        """Say that this rank is out of data; the result is the last rank to join."""
        return self.submit(Collective(Kind.JOIN, "noname"), background=background)

    def prepare(self, request: Request) -> PreparedAllreduce | None:
        """Return what repeats a named allreduce, if that is one collective of a transport.

        It is good until the job ends or the set is removed, and then refuses. Requests are cut by
        the fusion threshold, and a rank that goes inline must do the same as one with a request.
        """
        channel, tensors = self.channel(request.collective.process_set_id), request.tensors
        dtype, reduction = tensors[0].dtype, request.reduction
        if reduction.prescale_factor != 1.0 or reduction.op is ReduceOp.ADASUM:
            return None
        if not dtype.is_floating_point:
            return None
        if len(tensors) > 1:
            if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
                return None
            if sum(tensor.nbytes for tensor in tensors) > channel.group.config.fusion_threshold:
                return None
        return PreparedAllreduce(request, channel)

    def _remember(self, request: Request, channel: Channel) -> None:
        """Prepare to repeat a blocking allreduce of one tensor, for bindings to find by name."""
        has_room = len(self.prepared) < channel.group.config.cache_capacity
        if has_room and (request.plain or _is_plain_on_device(request)):
            prepared = self.prepare(request)
            if prepared is not None:
                self.prepared[request.collective.name] = prepared

    def _identify(
        self, channel: Channel, collective: Collective, tensors: Sequence[torch.Tensor]
    ) -> tuple[str, bytes]:
        """Return a collective's name on the wire and its signature; both are remembered by name."""
        kind = collective.kind
        if collective.name is None:
            name = f"{kind.value}.{channel.queue.auto_name(kind)}"
            return name, signature_of(collective, name, tensors)
        if collective.splits is not None:  # which may differ between ranks, and in every step
            collective = collective._replace(splits=None)
        if len(tensors) == 1:
            form: Any = tensors[0].dtype, tensors[0].shape, tensors[0].device
        else:
            form = tuple((tensor.dtype, tensor.shape, tensor.device) for tensor in tensors)
        known = self._signatures.get((collective, form))
        if known is None:
            name = f"{kind.value}.{collective.name}"
            known = name, signature_of(collective, name, tensors)
            capacity = channel.group.config.cache_capacity
            if self._signatures and len(self._signatures) >= capacity:
                self._signatures.popitem(last=False)
            if capacity > 0:
                self._signatures[collective, form] = known
        return known


def _checked(collective: Collective, tensors: Sequence[torch.Tensor], group: Group) -> Collective:
    """Return the collective, with splits, if its set can do it with these tensors."""
    if len(tensors) > 1:
        _check_one_device(tensors)
    kind = collective.kind
    if kind is Kind.ALLREDUCE:
        check_adasum(collective.reduction, all_ranks=collective.process_set_id == WORLD)
    elif kind is Kind.BROADCAST:
        if collective.root_rank not in group.global_ranks:
            raise ValueError(
                f"root rank {collective.root_rank} is not in the process set, whose ranks are "
                f"{list(group.global_ranks)}"
            )
    elif kind is Kind.REDUCESCATTER:
        check_scattered(collective.reduction.op)
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ValueError("reducescatter needs at least one dimension, got a scalar")
    elif kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        if any(tensor.dim() == 0 for tensor in tensors):
            raise UndefinedOperationError(
                f"{kind.value} needs at least one dimension, got a scalar"
            )
        if kind is Kind.ALLTOALL:
            splits = _check_splits(tensors[0].shape[0], collective.splits, group.size)
            return collective._replace(splits=splits)
    return collective


def _is_plain_on_device(request: Request) -> bool:
    """Return whether a request is for one tensor on a device, which is reduced as it is."""
    tensors = request.tensors
    return (
        len(tensors) == 1
        and not tensors[0].is_cpu
        and request.reduction.prescale_factor == 1.0
        and request.reduction.op is not ReduceOp.ADASUM
    )


def check_adasum(reduction: Reduction, *, all_ranks: bool) -> None:
    """Raise for Adasum over only some of the ranks."""
    if reduction.op is ReduceOp.ADASUM and not all_ranks:
        raise NotImplementedError("Adasum works on the global process set only")


def check_scattered(op: ReduceOp) -> None:
    """Refuse what reducescatter cannot do, the way upstream's engine does."""
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise HorovodInternalError(f"reducescatter takes Sum or Average, not {op!r}")


def _check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise HorovodInternalError(
            f"the tensors of a group must be on one device; these are on {names}"
        )


def _check_splits(rows: int, splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return how many of `rows` go to each of `size` ranks."""
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(
                f"alltoall without splits needs a first dimension divisible by {size}, got {rows}"
            )
        return (rows // size,) * size
    if len(splits) != size:
        raise ValueError(f"alltoall needs one split for each of {size} ranks, got {len(splits)}")
    if min(splits) < 0:
        raise ValueError(f"alltoall splits must not be negative: {list(splits)}")
    if sum(splits) > rows:
        raise ValueError(f"alltoall splits sum up to {sum(splits)}, but there are {rows} rows")
    return tuple(splits)
