"""Reducing the gradients of a model's parameters, step by step. Used by DistributedOptimizer.

`horovod.torch.bucketing` decides what the buckets are and whether one is reduced as soon as its
last gradient has arrived, while backward goes on, or all after backward;
`horovod.torch.agreement` sees to it that all ranks decide alike; `horovod.torch.bucket_submission`
hands a bucket's gradients to the engine. Here is when that happens.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.topology import Topology
from horovod.engine.arguments import set_id
from horovod.engine.heap import join_pages
from horovod.engine.lane import Lane
from horovod.engine.runtime import runtime
from horovod.observe.statistics.counters import DeviceTiming
from horovod.observe.statistics.lane_timing import LaneTiming, StepRecorder
from horovod.torch.agreement import Agreement, StepSamples, agree, propose
from horovod.torch.autotune import StepTuner, for_overlap_alone
from horovod.torch.bucket_submission import BucketSubmitter
from horovod.torch.bucketing import (
    LOOK_STEPS,
    TRIAL_STEPS,
    Bucketing,
    BucketPolicy,
    Measurement,
    begun_early,
    bucket_title,
    can_overlap,
    cut,
    device_bucket,
    hides_more,
    sent_last,
)
from horovod.torch.buckets import Bucket, Named
from horovod.torch.device_bucket import DeviceBucket
from horovod.torch.direct_reducer import DirectReducer, lane_device, make_buckets

# After these steps the heap is put on huge pages: tensors find their places in it in the first few,
# and other ones when the program changes.
_JOINING = frozenset(2**power for power in range(2, 11))


class Reducer:
    """What becomes of the gradients of one optimizer: here nothing, they stay the rank's own."""

    _first_arrival = 0.0  # when the first gradient of this step was there; 0: none is

    def arrived(self, index: int) -> None:
        """The gradient of this parameter, by its place among all, is complete on this rank."""
        self._first_arrival = self._first_arrival or time.monotonic()

    def in_flight(self) -> bool:
        """Whether gradients have arrived that are not dealt with yet."""
        return self._first_arrival > 0

    def finish(self) -> None:
        """Reduce what is left and wait for everything."""
        self._first_arrival = 0.0

    def abandon(self) -> None:
        """Wait for what is under way, and drop the results: e.g. the state was replaced."""
        self._first_arrival = 0.0

    def close(self) -> None:
        """Release what reducing needs: another reducer takes over, or none."""


class GradientReducer(Reducer):
    """All buckets of one optimizer."""

    def __init__(
        self,
        params: Sequence[Named],
        groups: Sequence[Sequence[Named]] | None,
        submitter: BucketSubmitter,
    ) -> None:
        self.name = ""
        self._params = list(params)
        self._groups = groups
        self._submitter, self._start = submitter, submitter.start
        self._process_set, self._hook = submitter.process_set, submitter.hook
        self._delayed = submitter.alone  # the next forward waits, for one bucket after the other
        self._index = {param: index for index, (_, param) in enumerate(params)}
        # What the ranks have agreed on, for how long, and what is to be decided by it.
        self._agreed: Agreement
        self._agreed_in: Topology | None = None  # the job whose ranks have agreed
        self._policy: BucketPolicy
        self._params_in_order: list[Named] = []  # of arrival
        self._arrivals: list[int] = []  # until the ranks have agreed
        # While it is measured: seconds that all takes, and seconds that backward could hide of it.
        self._trial: StepSamples | None = None
        # With overlap_forward, then: bytes that backward hides, and bytes a second; and while that
        # is corrected, seconds that the network had nothing to do when backward ended.
        self._hidden = self._rate = 0.0
        self._rests: StepSamples | None = None
        self._tuner: StepTuner | None = None  # while measured times decide how to go on
        self._overlap = False
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}  # by the places of parameters
        # In their place where gradients are on devices: see `direct_reducer`.
        self._lane: Lane | None = None
        self._lane_closer: Any = None
        self._direct: DirectReducer | None = None
        self._recorder: StepRecorder | None = None
        self._backward: DeviceTiming | None = None  # of this step, on a device
        self._steps = 0
        self._last_step = 0.0  # when the gradients of the step before were there

    # -- a step ----------------------------------------------------------------------------

    def arrived(self, index: int) -> None:
        if not self._first_arrival:
            self._first_arrival = time.monotonic()
            param = self._params[index][1]
            if not param.is_cpu and self._direct is None:
                self._backward = DeviceTiming(param.device)
        if self._agreed_in is not runtime.topology:
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
        if self._hook is not None:
            self._start_in_order()
        elif bucket.started or bucket.unsent is not None:
            return
        elif not bucket.held:
            self._start(bucket, background=True)
        elif bucket.early:
            self._submitter.start_early(bucket)

    def _start_in_order(self) -> None:
        """Start complete buckets, but none before those that come first on all ranks."""
        for bucket in self._buckets:
            if bucket.awaited > 0:
                break
            if not bucket.started:
                self._start(bucket, background=True)

    def is_tuning(self) -> bool:
        """Whether the best way to reduce is still being looked for."""
        return self._tuner is not None or self._trial is not None

    def finish(self) -> None:
        if self._agreed_in is not runtime.topology:
            self._agree()
        if self._direct is not None:
            self._finish_direct(self._direct)
            return
        failure: Exception | None = None
        arrival, began = self._first_arrival, time.monotonic()
        backward = self._tell_backward(began)
        try:
            for bucket in self._by_need():
                if not bucket.started:
                    self._start(bucket, background=len(self._buckets) > 1)
        except Exception as error:
            failure = error
        failure = self._wait() or failure
        if failure is not None:
            raise failure
        took = time.monotonic() - began
        self._end_step(arrival, began)
        self._correct(rested=0.0)
        self._try(took, backward)
        self._tune()

    def _tune(self) -> None:
        """Go on as the measured times say, on all ranks alike."""
        if self._tuner is not None:
            setting = self._tuner.after_step()
            if setting is not None:
                self._make(setting.overlap, setting.bucket_bytes)
            if self._tuner.settled:
                self._tuner = None

    def _finish_direct(self, direct: DirectReducer) -> None:
        """The same where each bucket was begun by its hook."""
        arrival, began = self._first_arrival, time.monotonic()
        failure, timing = direct.finish()
        self._end_direct(direct, arrival, began, timing)
        if failure is not None:
            if isinstance(failure, HorovodInternalError):
                self._agreed_in = self._direct = None  # if there is a next step, it agrees anew
            raise failure
        if self._trial is not None:
            # A rank without gradients in this step has nothing to show, but counts the step, too.
            least = self._trial.least(_nothing_shown if timing is None else timing.measure)
            if least is not None:
                self._trial = None
                direct.hold_back(*least)
        self._tune()

    def _end_direct(
        self, direct: DirectReducer, arrival: float, began: float, timing: LaneTiming | None
    ) -> None:
        """Count a step whose reductions are begun, and record it."""
        self._first_arrival = 0.0
        self._arrivals.clear()
        self._backward = None
        seconds = began - arrival if arrival else 0.0
        runtime.statistics.add_backward(seconds, len(direct.buckets), direct.last_timing)
        self._steps += 1
        timeline = runtime.timeline
        if timeline is not None and timing is not None:
            if self._recorder is None:
                self._recorder = StepRecorder(self.name, direct.lane.device)
            self._recorder.add(timeline, self._steps, timing)

    def _tell_backward(self, now: float) -> float:
        """The gradients are wanted: what came before was backward, from the first of them on.

        How many seconds of it.
        """
        seconds = now - self._first_arrival if self._first_arrival else 0.0
        timing, self._backward = self._backward, None
        if timing is not None:
            timing.end()
        runtime.statistics.add_backward(seconds, len(self._buckets), timing)
        return seconds

    def _by_need(self) -> list[Bucket]:
        """In the order in which to start them: of those held, the last is needed first."""
        held = [bucket for bucket in self._buckets if bucket.held]
        return [bucket for bucket in self._buckets if not bucket.held] + held[::-1]

    def can_delay(self) -> bool:
        """Whether there is something to gain if nobody waits in a step: see `release`."""
        ready = self._agreed_in is runtime.topology and not self.is_tuning() and self._overlap
        if not ready or self._direct is not None:
            return ready
        return self._policy.crosses_hosts and not self._policy.on_device

    def release(self) -> Sequence[Bucket | DeviceBucket]:
        """Start what is left, and leave it to the caller to wait for each bucket (`Bucket.settle`).

        The caller does so with all of them before it comes here again.
        """
        arrival, began = self._first_arrival, time.monotonic()
        if self._direct is not None:
            try:
                timing = self._direct.release()
            except HorovodInternalError:
                self._direct.abandon()
                self._agreed_in = self._direct = None
                raise
            self._end_direct(self._direct, arrival, began, timing)
            return self._direct.buckets
        self._tell_backward(began)
        rested = self._has_rested(began)
        try:
            for bucket in self._by_need():
                if not bucket.started:
                    self._start(bucket, background=True)
                bucket.check_unchanged()
            self._correct(rested)
        except Exception:
            self._wait()
            raise
        self._first_arrival = 0.0
        self._end_step(arrival, began)
        return self._buckets

    def _has_rested(self, now: float) -> float:
        """For how many seconds nothing of ours has been under way, after something was."""
        requests = [request for bucket in self._buckets for request in bucket.requests]
        if not requests or not all(request.done() for request in requests):
            return 0.0
        return now - max(request.finished_at for request in requests)

    def abandon(self) -> None:
        self._wait()

    def close(self) -> None:
        self._close_lane()

    def _wait(self) -> Exception | None:
        """Let all requests end, for their names will be used again. The first failure."""
        if self._direct is not None:
            self._direct.abandon()
        try:
            failures = [bucket.settle() for bucket in self._buckets]
        finally:
            self._first_arrival = 0.0
            self._arrivals.clear()
            for bucket in self._buckets:
                bucket.reset()
        return next(filter(None, failures), None)

    def _end_step(self, first_arrival: float, backward_ended: float) -> None:
        """In the timeline a step lasts from the end of one exchange of gradients to the next."""
        self._steps += 1
        timeline, config = runtime.timeline, runtime.config
        if timeline is not None and self._last_step:
            backward = (first_arrival, backward_ended)
            timeline.step(self.name, self._steps, self._last_step, backward)
        self._last_step = time.perf_counter()
        joins = self._steps in _JOINING and config.keep_heap and config.huge_pages
        if joins and any(param.is_cpu for _, param in self._params):
            join_pages()

    # -- what is reduced together ----------------------------------------------------------

    def _agree(self) -> None:
        """Agree with the other ranks on name, buckets, and which gradients are sparse.

        Buckets are cut in the order in which gradients arrived on the first rank. While a rank
        has joined, the others agree for this step only: it could not know the outcome later.
        """
        device = lane_device(param for _, param in self._params)
        on_device = device is not None or any(not param.is_cpu for _, param in self._params)
        crosses_hosts = runtime.crosses_hosts(set_id(self._process_set))
        terms = self._submitter.lane_terms()
        proposal = propose(
            can_overlap(on_device, crosses_hosts, runtime.config.overlap_backward),
            terms is not None and device is not None,
            self._arrivals,
            self._submitter.find_sparse(param for _, param in self._params),
        )
        agreed, complete = agree(proposal, self._process_set)
        self.name = self._submitter.name = f"DistributedOptimizer.{agreed.number}"
        dims = zip(self._params, agreed.sparse_dims, strict=True)
        self._submitter.sparse_dims = {param: dim for (_, param), dim in dims if dim}
        self._params_in_order = [self._params[index] for index in agreed.order]
        self._agreed = agreed
        self._policy = BucketPolicy(
            num_bytes=sum(param.nbytes for _, param in self._params),
            limit=agreed.fusion_threshold,
            overlap=agreed.overlap,
            on_device=on_device,
            crosses_hosts=crosses_hosts,
            spare_cores=agreed.spare_cores,
            fixed=agreed.fixed,
            autotune=agreed.autotune,
            grouped=self._groups is not None,
            hooked=self._hook is not None,
            delayed=self._delayed,
        )
        self._close_lane()
        if complete:
            self._agreed_in = runtime.topology
            if agreed.direct and device is not None:
                self._open_lane(device)
        if self._lane is not None:
            self._adopt_direct()
            return
        self._adopt(self._policy.at_first() if complete else self._policy.unmeasured())

    def _adopt_direct(self) -> None:
        """Reduce on the lane, and measure what is to be measured."""
        policy = self._policy
        most = device_bucket(policy.num_bytes, policy.limit)
        measurement = Measurement.EVERYTHING if policy.autotune else Measurement.NOTHING
        if self._delayed and policy.overlap:
            measurement = Measurement.NETWORK
        self._adopt(Bucketing(policy.overlap, most, measurement))

    def _make_direct(self, lane: Lane, overlap: bool, most: int) -> None:
        """Buckets of up to `most` bytes on the lane."""
        if self._direct is not None:
            self._direct.finish_comparison()  # or the next would bear the same name
        terms = self._submitter.lane_terms()
        assert terms is not None
        buckets = make_buckets(
            self.name,
            self._params_in_order,
            self._groups,
            most,
            self._agreed.fusion_threshold,
            terms,
        )
        for bucket in buckets:
            runtime.name_members(bucket.name, [name for name, _ in bucket.params])
        measures_all = self._delayed
        self._direct = DirectReducer(lane, buckets, self._index, overlap, measures_all)

    def _open_lane(self, device: torch.device) -> None:
        """Open a lane on all ranks; it is closed when this reducer is not used any more."""
        lane = runtime.open_lane(set_id(self._process_set), self.name, device)
        self._lane = lane
        if lane is not None:
            self._lane_closer = weakref.finalize(self, lane.close)
            self._lane_closer.atexit = False  # the end of the job closes all that are left

    def _close_lane(self) -> None:
        self._lane = self._direct = None
        if self._lane_closer is not None:
            self._lane_closer()
            self._lane_closer = None

    def _adopt(self, decision: Bucketing) -> None:
        """Go on like that, and measure what is to be measured."""
        self._make(decision.overlap, decision.bucket_bytes)
        self._rests = None
        in_trial = decision.measurement is Measurement.NETWORK
        self._trial = StepSamples(TRIAL_STEPS, self._process_set) if in_trial else None
        self._tuner = None
        if decision.measurement in (Measurement.OVERLAP, Measurement.EVERYTHING):
            for_all = decision.measurement is Measurement.EVERYTHING
            self._tuner = StepTuner(
                self.name,
                self._params_in_order,
                decision,
                grouped=self._groups is not None,
                agreed=self._agreed if for_all else for_overlap_alone(self._agreed),
                process_set=self._process_set,
            )

    def _try(self, seconds: float, hidden: float) -> None:
        """All gradients were reduced at once in so many seconds; after some of that, cut buckets.

        A rank that others wait for sees what the network alone takes, so the least time counts.
        """
        least = None if self._trial is None else self._trial.least(lambda: (seconds, hidden))
        if least is None:
            return
        seconds, hidden = least
        self._adopt(self._policy.after_trial(seconds))
        if self._delayed and seconds > 0:
            self._rate = self._policy.num_bytes / seconds
            self._hidden = self._rate * hidden
            self._cut_buckets()
            self._rests = StepSamples(LOOK_STEPS, self._process_set)

    def _correct(self, rested: float) -> None:
        """The network had nothing to do for so long when backward ended: let it hide more."""
        least = None if self._rests is None else self._rests.least(lambda: (rested,))
        if least is None:
            return
        more = hides_more(self._policy.num_bytes, self._hidden, least[0], self._rate)
        if more is None:
            self._rests = None
        else:
            self._hidden = more
            self._cut_buckets()

    def _cut_buckets(self) -> None:
        """Start in the step what backward does not hide; what comes last comes by itself."""
        sizes = [bucket.nbytes for bucket in self._buckets]
        for bucket, early in zip(self._buckets, begun_early(sizes, self._hidden), strict=True):
            bucket.early, bucket.last = early, 0
        waited_for = self._by_need()[-1]
        if waited_for.held:
            waited_for.last = sent_last(waited_for.nbytes - waited_for.early, self._rate)
        for bucket in self._buckets:
            for name in bucket.part_names:
                runtime.name_members(name, [param_name for param_name, _ in bucket.params])

    def _make(self, overlap: bool, most: int) -> None:
        """Buckets of up to `most` bytes; all in one if nothing overlaps."""
        self._overlap = overlap
        if self._lane is not None:
            self._make_direct(self._lane, overlap, most)
            return
        params = self._params_in_order
        groups: Iterable[Sequence[Named]] = [params]
        if self._groups is not None:
            groups = self._groups
        elif overlap:
            sizes = [param.nbytes for _, param in params]
            parts = cut(sizes, most, self._agreed.fusion_threshold)
            groups = [[params[index] for index in part] for part in parts]
        found = [members for members in groups if members]
        self._buckets = []
        for number, members in enumerate(found, 1):
            names = [name for name, _ in members]
            bucket = Bucket(f"{self.name}.{bucket_title(number, len(found), names)}", members)
            runtime.name_members(bucket.name, names)
            self._buckets.append(bucket)
        self._bucket_of = {self._index[param]: b for b in self._buckets for _, param in b.params}


def _nothing_shown() -> tuple[float, float]:
    """What counts for nothing where the least of some times is looked for."""
    return inf, inf
