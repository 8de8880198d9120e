"""Lanes: reductions on a device that ranks begin without asking each other first.

An ordinary request waits until all ranks have agreed to run it. The gradients of an optimizer come
in the same buckets in every step, and waiting would hold the device up. So an optimizer whose
gradients are on devices has a *lane*: a communicator of its own, on which it begins its reductions
straight from backward, in an order that all ranks have agreed on once. In each step the ranks then
compare what they have begun (`confirm`), while the device works.

- A rank that has joined learns from the comparison what the others have begun, and adds zeros.
- Ranks that have begun different things, or one of which is lost, get an error that says so, and
  the lane is aborted, because otherwise the device would wait for ever.
- When nobody talks to the other ranks, because the program itself waits for the device, the
  transport looks whether they are still there (`horovod.transport.device.device_watch`).

Made by a channel (`Channel.open_lane`), used by `horovod.torch.gradients.direct_reducer`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Collective, Kind, LanePlan, signature_of
from horovod.engine.request import Request, RoundDriver
from horovod.observe.statistics.counters import Counters
from horovod.transport.base import DEVICE, Group, Transport
from horovod.transport.device.farewells import finish_or_leave
from horovod.transport.device.process_group import DeviceTransport, DeviceWork


class LaneOwner(RoundDriver, Protocol):
    """A process set's channel, as its lanes see it."""

    group: Group

    def submit(self, request: Request) -> Request:
        """Queue a request."""

    def fail(self, error: BaseException) -> HorovodInternalError:
        """Fail everything in the set, here and on the other ranks."""

    def close_lane(self, lane: Lane) -> None:
        """Release a lane that is not used any more."""


class Lane:
    """One optimizer's reductions on a device. Its methods are called by one thread at a time."""

    def __init__(
        self, name: str, channel: LaneOwner, transport: DeviceTransport, counters: Counters | None
    ) -> None:
        self.name = name
        self.device = transport.device
        self.counters = counters  # None: nobody counts
        self._channel = channel
        self._transport = transport
        self._signatures: dict[LanePlan, bytes] = {}

    def allreduce(self, tensor: torch.Tensor) -> DeviceWork:
        """Begin to sum up a flat tensor, in place, after what the current stream has been given."""
        return self._transport.start_allreduce(tensor, ReduceOp.SUM)

    def confirm(self, plan: LanePlan) -> Request:
        """Compare with the other ranks what this step has begun. Returns a request to wait for.

        It is finished when all ranks have begun the same; the device may still be at work. If it
        fails, so does whatever the device still does on this lane.
        """
        name = f"{Kind.CONFIRM.value}.{self.name}"
        collective = Collective(Kind.CONFIRM, self.name, plan=plan)
        signature = self._signatures.get(plan)
        if signature is None:
            signature = self._signatures[plan] = signature_of(collective, name)
        request = Request(self._channel, collective, name, signature)
        request.on_failure = self.abort
        return self._channel.submit(request)

    def mark(self) -> None:
        """Watch the device until it has run a graph with our reductions, which it was given."""
        self._transport.mark_stream()

    def check_usable(self) -> None:
        """Raise if nothing can be reduced on this lane any more."""
        self._transport.check_usable()

    def add_graph(self, forget: Callable[[], object]) -> None:
        """Have `forget` called before the lane ends: its library waits for graphs that use it."""
        self._transport.graphs.append(forget)

    def fail(self, error: Exception, what: str) -> HorovodInternalError:
        """Tell all ranks that `what` failed here; return the error that the caller should raise."""
        if isinstance(error, HorovodInternalError):
            return error
        me = self._channel.group.describe(self._channel.group.rank)
        failure = HorovodInternalError(
            f"{me} failed in {what!r} on {self.device}: {type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return self._channel.fail(failure)

    def abort(self, error: HorovodInternalError) -> None:
        """End what the device waits for; the lane cannot be used any more."""
        self._transport.abort(str(error))

    def close(self) -> None:
        """Release the communicator when the device has finished; returns at once.

        All ranks do so, each in its own time.
        """
        finish_or_leave(
            partial(self._channel.close_lane, self), f"could not close {self.name!r}", seconds=0
        )


def open_transport(
    for_device: Callable[[torch.device, str], Transport], device: torch.device, name: str
) -> DeviceTransport | None:
    """Connect with the other ranks; None where these tensors go through host memory. Collective."""
    transport = for_device(device, name)
    if DEVICE in transport.media:
        assert isinstance(transport, DeviceTransport)
        return transport
    transport.close()
    return None


def stand_in(transport: DeviceTransport, plan: LanePlan) -> None:
    """Add zeros to what the other ranks have begun on a lane: this one has joined."""
    for dtype, count in zip(plan.dtypes, plan.counts, strict=True):
        zeros = torch.zeros(count, dtype=getattr(torch, dtype), device=transport.device)
        transport.start_allreduce(zeros, ReduceOp.SUM).wait()
