"""Reducing gradients on a device: each bucket begins in the hook of its last gradient.

Used by `horovod.torch.gradients.reducer` once the ranks have agreed on an order, where all
gradients are on devices and the device's library (NCCL, XCCL) reduces them. Nothing is asked of the
other ranks and no other thread is woken: the hook of a bucket's last gradient packs them all and
puts the reduction into the library's queue (`horovod.engine.execution.lane`).
`finish` lets the device, and not the host, wait for the results, and has the ranks compare what
they have begun, which the next step looks at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from math import inf

import torch

from horovod.engine.collective import LanePlan
from horovod.engine.execution import capture
from horovod.engine.execution.lane import Lane
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.observe.statistics.lane_timing import LaneTiming
from horovod.torch.gradients.bucketing import (
    bucket_title,
    cut_for_device,
    last_buckets,
    num_hidden,
)
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.device_bucket import DeviceBucket, LaneReduction
from horovod.torch.gradients.layouts import is_dense

# Measuring costs the device some time. The first steps, which are not like those that follow, are
# all measured, and then one of several, which counts for the others.
_FIRST_STEPS = 4
_STEPS_BETWEEN = 16


class DirectReducer:
    """All buckets of one optimizer, on a lane of its own.

    Args:
        lane: The lane on which they are reduced.
        buckets: Buckets, in the order in which backward completes them.
        index_of: The index of each parameter among all of the optimizer's.
        overlap: Whether buckets begin while backward goes on, or all after it.
        measures_all: Whether every step is measured, and not one now and then.
    """

    def __init__(
        self,
        lane: Lane,
        buckets: Sequence[DeviceBucket],
        index_of: Mapping[torch.nn.Parameter, int],
        overlap: bool,
        measures_all: bool = False,
    ) -> None:
        self.lane = lane
        self.buckets = list(buckets)
        # The bucket of each parameter, by the parameter's index.
        self._bucket_of = {
            index_of[param]: bucket for bucket in buckets for _, param in bucket.params
        }
        self._confirmation: Request | None = None  # comparison of the last step
        self._timing: LaneTiming | None = None  # times of this step, if it is measured
        self._measured: LaneTiming | None = None  # times of the last measured step
        self._is_first = True  # whether the next gradient is the first of a step
        self._steps = 0
        self._released: LaneTiming | None = None  # times of the last step that `release` ended
        self.hold(len(self.buckets) if overlap else 0, self.buckets)
        self._measures_all = measures_all

    def hold(self, num_early: int, order: Sequence[DeviceBucket]) -> None:
        """Begin the first `num_early` buckets of `order` in backward, the others in the step.

        From now on steps are measured now and then.
        """
        self._measures_all = False
        self._order = list(order)
        self._num_early = num_early
        self._next = 0  # index in the order: the buckets before it have begun
        forms = [(bucket.wire_dtype, bucket.count) for bucket in self._order]
        self._plan = LanePlan.of(forms)

    def hold_back(self, seconds: float, backward: float) -> None:
        """Begin in backward only what it hides, and the rest in the order of the next forward.

        Args:
            seconds: The time that it takes to reduce all gradients.
            backward: The time that backward takes from the first gradient on.
        """
        sizes = [bucket.nbytes for bucket in self.buckets]
        is_known = 0 < seconds < inf
        hidden = backward / seconds * sum(sizes) if is_known else inf
        num_early = num_hidden(sizes, hidden)
        self.hold(num_early, [*self.buckets[:num_early], *self.buckets[num_early:][::-1]])

    def arrived(self, index: int) -> None:
        """Note that the gradient of the parameter with this index is complete on this rank."""
        if self._is_first:
            self._is_first = False
            if self._is_measured():
                self._timing = LaneTiming(self.lane.device)
        bucket = self._bucket_of[index]
        bucket.awaited -= 1
        if bucket.awaited <= 0:
            while self._next < self._num_early and self._order[self._next].awaited <= 0:
                self._begin_next()

    def _is_measured(self) -> bool:
        """Return whether this step's times are measured."""
        if capture.active is not None:  # moments in a graph cannot be told
            return False
        is_due = self._steps < _FIRST_STEPS or self._steps % _STEPS_BETWEEN == 0
        return is_due or self._measures_all or runtime.timeline is not None

    def _begin_next(self) -> None:
        bucket = self._order[self._next]
        self._next += 1
        try:
            bucket.work = work = self.lane.allreduce(bucket.pack())
        except Exception as error:
            raise self.lane.fail(error, bucket.name) from error
        if self._timing is not None:
            self._timing.add(bucket.name, work, bucket.nbytes, bucket.dtype)

    def _start_rest(self) -> LaneTiming | None:
        """Begin what backward has not, and have the ranks compare what all have begun.

        Returns the times of the step, if it is measured. Raises what the ranks found when they
        compared the step before.
        """
        if self._timing is not None:
            self._timing.end_backward()
        if self._released is not None:  # whose buckets have all been settled since
            self._released.complete()
            self._released = None
        self.finish_comparison()
        while self._next < len(self._order):
            self._begin_next()
        timing = self._timing
        self._end()
        captured = capture.active
        if captured is not None and captured.is_on:  # nothing has begun: each replay does
            captured.add(self)
            return None
        self._compare(timing)
        return timing

    def _compare(self, timing: LaneTiming | None) -> None:
        """Have the ranks compare the reductions that a step has begun, and count them."""
        self._confirmation = self.lane.confirm(self._plan)
        self._steps += 1
        self._count(timing)

    def replayed(self) -> None:
        """Count a replay of a graph that holds a step of these reductions."""
        self._compare(None)
        self.lane.mark()
        runtime.statistics.add_backward(0.0, len(self.buckets), self.last_timing)

    def finish(self) -> tuple[Exception | None, LaneTiming | None]:
        """Begin what is left, and let the device wait for all results.

        Returns the first failure, and the step's times if it was measured.
        """
        try:
            timing = self._start_rest()
        except Exception as error:
            self.abandon()
            return error, None
        with contextlib.nullcontext() if timing is None else timing.waiting():
            failures = [bucket.settle() for bucket in self.buckets]
        if timing is not None:
            timing.complete()
        return next(filter(None, failures), None), timing

    def release(self) -> LaneTiming | None:
        """Begin what is left, and leave it to the caller to settle each bucket."""
        captured = capture.active
        if captured is not None:
            raise RuntimeError(
                "a step with overlap_forward= cannot be captured into a CUDA graph, because it "
                "ends in the next one: leave overlap_forward out"
            )
        self._released = timing = self._start_rest()
        for bucket in self.buckets:
            bucket.timing = timing
        return timing

    def finish_comparison(self) -> None:
        """Wait until the ranks have compared what the last step began; raise what they found."""
        confirmation, self._confirmation = self._confirmation, None
        if confirmation is not None:
            confirmation.wait()

    @property
    def last_timing(self) -> LaneTiming | None:
        """The times of the last step that was measured: the others take about as long."""
        return self._measured

    def abandon(self) -> None:
        """Let the device wait for what is under way, and drop the results."""
        for bucket in self.buckets:
            bucket.settle()
        self._end()

    def _end(self) -> None:
        """Prepare for the first gradient of the next step."""
        self._timing = None
        self._is_first = True
        self._next = 0

    def _count(self, timing: LaneTiming | None) -> None:
        self._measured = timing or self._measured
        counters = self.lane.counters
        if counters is not None:
            counters.operations += len(self._order)
            for bucket in self._order:
                on_wire = bucket.num_elements * bucket.wire_dtype.itemsize
                counters.count_on_device(bucket.nbytes, on_wire)
            if self._measured is not None:
                counters.timings.append(self._measured)


def lane_device(params: Iterable[torch.nn.Parameter]) -> torch.device | None:
    """Return the device on which a lane can reduce all these parameters' gradients, if any.

    They must be on one accelerator, of real types, and laid out without gaps.
    """
    found = None
    for param in params:
        if param.is_cpu or not param.is_floating_point() or not is_dense(param):
            return None
        if found is not None and param.device != found:
            return None
        found = param.device
    return found


def make_buckets(
    name: str,
    params: Sequence[Named],
    groups: Sequence[Sequence[Named]] | None,
    most: int,
    limit: int,
    ranks: int,
    reduction: LaneReduction,
) -> list[DeviceBucket]:
    """Cut the parameters of the optimizer `name` into buckets.

    Args:
        name: Name of the optimizer.
        params: Parameters, in the order in which their gradients arrive.
        groups: Parameters that the user wants to be reduced together; None leaves that to us.
        most: Bytes of a bucket.
        limit: Bytes that no bucket of ours exceeds, unless one gradient does.
        ranks: Number of ranks.
        reduction: The factors, and the narrower type in which gradients travel, if any.
    """
    found: list[list[Named]] = []
    for group in [params] if groups is None else groups:
        sizes = [param.nbytes for _, param in group]
        kinds = [param.dtype for _, param in group]
        if groups is None:
            parts = cut_for_device(sizes, kinds, most, limit, last_buckets(ranks))
        else:
            parts = cut_for_device(sizes, kinds, sum(sizes), sum(sizes), whole=True)
        found += [[group[index] for index in part] for part in parts]
    buckets = []
    for number, members in enumerate(found, 1):
        title = bucket_title(number, len(found), [member for member, _ in members])
        buckets.append(DeviceBucket(f"{name}.{title}", members, reduction))
    return buckets
