"""Reducing the gradients of a model's parameters, step by step. Used by DistributedOptimizer.

`horovod.torch.gradients.plan` says what the ranks have agreed on and what buckets follow from it;
`horovod.torch.gradients.submission` hands a bucket's gradients to the engine. This module decides
when: as soon as a bucket's last gradient has arrived, while backward goes on, or after backward.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence

from horovod.common.exceptions import HorovodInternalError
from horovod.common.topology import Topology
from horovod.engine.arguments import set_id, set_size
from horovod.engine.execution.lane import Lane
from horovod.engine.runtime import runtime
from horovod.torch.gradients.agreement import StepSamples
from horovod.torch.gradients.autotune import StepTuner, for_overlap_alone
from horovod.torch.gradients.bucketing import (
    TRIAL_STEPS,
    Bucketing,
    Measurement,
    bucket_title,
    cut,
)
from horovod.torch.gradients.buckets import Bucket, Named
from horovod.torch.gradients.device_bucket import DeviceBucket
from horovod.torch.gradients.direct_reducer import DirectReducer, make_buckets
from horovod.torch.gradients.forward_schedule import ForwardSchedule, by_need, idle_time
from horovod.torch.gradients.plan import BucketPlan, make_plan
from horovod.torch.gradients.step_log import StepLog
from horovod.torch.gradients.submission import BucketSubmitter


class Reducer:
    """Base class of reducers. This one leaves gradients as they are, each rank's own."""

    _first_arrival = 0.0  # when the first gradient of this step was there; 0: none is

    def arrived(self, index: int) -> None:
        """Note that the gradient of the parameter with this index is complete on this rank."""
        self._first_arrival = self._first_arrival or time.monotonic()

    def in_flight(self) -> bool:
        """Return whether gradients have arrived that are not dealt with yet."""
        return self._first_arrival > 0

    def finish(self) -> None:
        """Reduce what is left and wait for everything."""
        self._first_arrival = 0.0

    def abandon(self) -> None:
        """Wait for what is under way, and drop the results: the state was replaced, for example."""
        self._first_arrival = 0.0

    def close(self) -> None:
        """Release what reducing needs, because another reducer takes over, or none."""


class GradientReducer(Reducer):
    """All buckets of one optimizer.

    Args:
        params: All parameters of the optimizer, the same on all ranks.
        groups: Parameters that the user wants to be reduced together; None leaves it to the plan.
        submitter: Starts the reductions of buckets.
    """

    def __init__(
        self,
        params: Sequence[Named],
        groups: Sequence[Sequence[Named]] | None,
        submitter: BucketSubmitter,
    ) -> None:
        self._params = list(params)
        self._groups = groups
        self._submitter, self._start = submitter, submitter.start
        self._index = {param: index for index, (_, param) in enumerate(params)}
        self._log = StepLog(params)
        # What the ranks have agreed on, and in which job. Until then, the gradients that have come.
        self._plan: BucketPlan
        self._planned_in: Topology | None = None
        self._arrivals: list[int] = []
        # These are set while measured times decide how to go on: how long reducing everything and
        # backward take; which setting is fastest; which buckets backward hides.
        self._trial: StepSamples | None = None
        self._tuner: StepTuner | None = None
        self._schedule: ForwardSchedule | None = None
        # The buckets, also by the indices of parameters; or what reduces those on a device.
        self._overlap = False
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._lane: _OwnedLane | None = None
        self._direct: DirectReducer | None = None

    @property
    def name(self) -> str:
        """The optimizer's name, on which the ranks agree in its first step."""
        return self._log.name

    # -- a step ----------------------------------------------------------------------------

    def arrived(self, index: int) -> None:
        if not self._first_arrival:
            self._first_arrival = time.monotonic()
            param = self._params[index][1]
            if not param.is_cpu and self._direct is None:
                self._log.begin_backward(param.device)
        if self._planned_in is not runtime.topology:
            self._arrivals.append(index)
            return
        if self._direct is not None:
            self._direct.arrived(index)
            return
        if not self._overlap:
            return
        bucket = self._bucket_of[index]
        bucket.awaited -= 1
        if bucket.awaited > 0:
            return
        if self._submitter.hook is not None:
            self._start_in_order()
        elif not bucket.started and not bucket.is_held:
            self._start(bucket, background=True)

    def _start_in_order(self) -> None:
        """Start complete buckets, but none before its predecessors: all ranks have one order."""
        for bucket in self._buckets:
            if bucket.awaited > 0:
                break
            if not bucket.started:
                self._start(bucket, background=True)

    def is_tuning(self) -> bool:
        """Return whether the best way to reduce is still being looked for."""
        return self._tuner is not None or self._trial is not None

    def finish(self) -> None:
        if self._planned_in is not runtime.topology:
            self._make_plan()
        if self._direct is not None:
            self._finish_direct(self._direct)
            return
        failure: Exception | None = None
        arrival, began = self._first_arrival, time.monotonic()
        backward = self._log.end_backward(arrival, began, len(self._buckets))
        try:
            for bucket in by_need(self._buckets):
                if not bucket.started:
                    self._start(bucket, background=len(self._buckets) > 1)
        except Exception as error:
            failure = error
        failure = self._wait() or failure
        if failure is not None:
            raise failure
        took = time.monotonic() - began
        self._log.end_step(arrival, began)
        if self._schedule is not None:
            self._schedule.correct(idle=0.0)
        self._try(took, backward)
        self._tune()

    def _finish_direct(self, direct: DirectReducer) -> None:
        """Finish a step in which each bucket was begun by its hook."""
        arrival, began = self._first_arrival, time.monotonic()
        failure, timing = direct.finish()
        self._forget_arrivals()
        self._log.end_direct_step(direct, arrival, began, timing)
        if failure is not None:
            if isinstance(failure, HorovodInternalError):
                self._planned_in = self._direct = None  # if there is a next step, it agrees anew
            raise failure
        if self._trial is not None:
            # A rank without gradients in this step has nothing to show, but counts the step, too.
            times = self._trial.add_for_median(_nothing_shown if timing is None else timing.measure)
            if times is not None:
                self._trial = None
                direct.hold_back(*times)
        self._tune()

    def can_delay(self) -> bool:
        """Return whether a step gains if it ends with `release`, which does not wait."""
        ready = self._planned_in is runtime.topology and not self.is_tuning() and self._overlap
        if not ready or self._direct is not None:
            return ready
        policy = self._plan.policy
        return policy.crosses_hosts and not policy.on_device

    def release(self) -> Sequence[Bucket | DeviceBucket]:
        """Start what is left, and leave it to the caller to wait for each bucket (`Bucket.settle`).

        The caller must have waited for all of them before the next call.
        """
        arrival, began = self._first_arrival, time.monotonic()
        if self._direct is not None:
            try:
                timing = self._direct.release()
            except HorovodInternalError:
                self._direct.abandon()
                self._planned_in = self._direct = None
                raise
            self._forget_arrivals()
            self._log.end_direct_step(self._direct, arrival, began, timing)
            return self._direct.buckets
        self._log.end_backward(arrival, began, len(self._buckets))
        idle = idle_time(self._buckets, began)
        try:
            for bucket in by_need(self._buckets):
                if not bucket.started:
                    self._start(bucket, background=True)
                bucket.check_unchanged()
            if self._schedule is not None:
                self._schedule.correct(idle)
        except Exception:
            self._wait()
            raise
        self._first_arrival = 0.0
        self._log.end_step(arrival, began)
        return self._buckets

    def abandon(self) -> None:
        self._wait()

    def close(self) -> None:
        self._close_lane()

    def _wait(self) -> Exception | None:
        """Let all requests end, for their names will be used again; return the first failure."""
        if self._direct is not None:
            self._direct.abandon()
        try:
            failures = [bucket.settle() for bucket in self._buckets]
        finally:
            self._forget_arrivals()
            for bucket in self._buckets:
                bucket.reset()
        return next(filter(None, failures), None)

    def _forget_arrivals(self) -> None:
        """Prepare for the first gradient of the next step."""
        self._first_arrival = 0.0
        self._arrivals.clear()

    # -- what is reduced together ----------------------------------------------------------

    def _make_plan(self) -> None:
        """Agree with the other ranks, and cut buckets as the plan says.

        Buckets are cut in the order in which gradients arrived on the first rank. While a rank
        has joined, the others agree for this step only: it could not know the outcome later.
        """
        is_grouped = self._groups is not None
        plan = self._plan = make_plan(self._params, self._arrivals, is_grouped, self._submitter)
        self._log.name = self._submitter.name
        self._close_lane()
        if plan.is_complete:
            self._planned_in = runtime.topology
        if plan.lane_device is not None:
            set_number = set_id(self._submitter.process_set)
            lane = runtime.open_lane(set_number, self.name, plan.lane_device)
            self._lane = None if lane is None else _OwnedLane(lane)
        self._adopt(plan.first_bucketing(on_lane=self._lane is not None))

    def _close_lane(self) -> None:
        lane, self._lane, self._direct = self._lane, None, None
        if lane is not None:
            lane.close()

    def _adopt(self, decision: Bucketing) -> None:
        """Reduce as decided from now on, and measure what is to be measured."""
        self._make_buckets(decision.overlap, decision.bucket_bytes)
        self._schedule = None
        in_trial = decision.measurement is Measurement.NETWORK
        process_set = self._submitter.process_set
        self._trial = StepSamples(TRIAL_STEPS, process_set) if in_trial else None
        self._tuner = None
        if decision.measurement in (Measurement.OVERLAP, Measurement.EVERYTHING):
            for_all = decision.measurement is Measurement.EVERYTHING
            agreed = self._plan.agreed
            self._tuner = StepTuner(
                self.name,
                self._plan.params,
                decision,
                grouped=self._groups is not None,
                agreed=agreed if for_all else for_overlap_alone(agreed),
                process_set=process_set,
            )

    def _try(self, seconds: float, backward: float) -> None:
        """In a trial, record a step; after enough steps, cut buckets by their least times.

        A rank that others wait for sees what the network alone takes, so the least time counts.

        Args:
            seconds: The time in which all gradients were reduced at once.
            backward: The time that backward took from the first gradient on.
        """
        least = (
            None if self._trial is None else self._trial.add_for_least(lambda: (seconds, backward))
        )
        if least is None:
            return
        seconds, backward = least
        policy = self._plan.policy
        self._adopt(policy.after_trial(seconds))
        if policy.delayed and seconds > 0:
            process_set = self._submitter.process_set
            self._schedule = ForwardSchedule(self._buckets, seconds, backward, process_set)

    def _tune(self) -> None:
        """Go on as the measured times say, on all ranks alike."""
        if self._tuner is not None:
            setting = self._tuner.after_step()
            if setting is not None:
                self._make_buckets(setting.overlap, setting.bucket_bytes)
            if self._tuner.settled:
                self._tuner = None

    def _make_buckets(self, overlap: bool, most: int) -> None:
        """Cut gradients into buckets of up to `most` bytes; into one if nothing overlaps."""
        self._overlap = overlap
        if self._lane is not None:
            self._make_direct(self._lane.lane, overlap, most)
            return
        params = self._plan.params
        groups: Iterable[Sequence[Named]] = [params]
        if self._groups is not None:
            groups = self._groups
        elif overlap:
            sizes = [param.nbytes for _, param in params]
            parts = cut(sizes, most, self._plan.policy.limit)
            groups = [[params[index] for index in part] for part in parts]
        found = [members for members in groups if members]
        self._buckets = []
        for number, members in enumerate(found, 1):
            names = [name for name, _ in members]
            bucket = Bucket(f"{self.name}.{bucket_title(number, len(found), names)}", members)
            runtime.name_members(bucket.name, names)
            self._buckets.append(bucket)
        self._bucket_of = {self._index[param]: b for b in self._buckets for _, param in b.params}

    def _make_direct(self, lane: Lane, overlap: bool, most: int) -> None:
        """Cut gradients into buckets of up to `most` bytes on the lane."""
        if self._direct is not None:
            self._direct.finish_comparison()  # the next comparison will have the same name
        reduction = self._submitter.lane_reduction()
        assert reduction is not None
        plan, ranks = self._plan, set_size(self._submitter.process_set)
        buckets = make_buckets(
            self.name, plan.params, self._groups, most, plan.policy.limit, ranks, reduction
        )
        for bucket in buckets:
            runtime.name_members(bucket.name, [name for name, _ in bucket.params])
        measures_all = plan.policy.delayed
        self._direct = DirectReducer(lane, buckets, self._index, overlap, measures_all)


class _OwnedLane:
    """A lane that is closed by `close`, or when nobody uses this object any more."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.close = weakref.finalize(self, lane.close)
        self.close.atexit = False  # the end of the job closes all that are left


def _nothing_shown() -> tuple[float, float]:
    """Return times of zero, which do not count where the longest of all ranks does."""
    return 0.0, 0.0
