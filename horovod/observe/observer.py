"""Tell statistics, timeline and profilers what the engine does; it tells them in no other way.

Every channel has an `Observer`. Its rounds, its executor, the threads that wait and the prepared
reductions tell it what was queued, agreed on, begun and ended, and how many bytes that moved. Only
here is the time of a round accounted for: until all ranks are there it counts as waiting, after
that as reducing. Time of the background thread counts as hidden while no thread of the program
waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from horovod.observe.statistics.counters import DeviceTiming
from horovod.observe.statistics.operations import Operation
from horovod.observe.statistics.process import Statistics
from horovod.observe.statistics.ranges import Ranges, profiler_records, waiting
from horovod.observe.timeline.recorder import Timeline
from horovod.transport.base import Group

_NOTHING = nullcontext()


@dataclass
class Trace:
    """Says who wants to see every operation of a job, such as a timeline that is recorded."""

    timeline: Timeline | None = None
    members: dict[str, Sequence[str]] = field(default_factory=dict)  # tensors of grouped requests
    shares_arrivals: bool = False  # ranks tell each other when they submitted; equal on all ranks
    has_ranges: bool = False  # whether a tool or the log wants every operation
    watched: bool = False  # any of these is wanted: then no operation takes the shortest way

    def record(self, timeline: Timeline | None) -> None:
        """Record into this timeline from now on; None ends the recording."""
        self.timeline = timeline
        self.watched = timeline is not None or self.shares_arrivals or self.has_ranges


class Observer:
    """Follows the operations of one channel.

    Any thread may call `queued`, `waiting` and `waited_for`; the rest is for the thread that runs a
    round. `statistics` is None where nobody counts.
    """

    def __init__(
        self,
        set_id: int,
        group: Group,
        trace: Trace,
        statistics: Statistics | None = None,
        media: tuple[str, ...] = (),
    ) -> None:
        self.trace = trace
        self.counters = None if statistics is None else statistics.open(media)
        self.lane_counters = None if statistics is None else statistics.open(())
        self._statistics = statistics
        self._set_id = set_id
        self._ranks = group.global_ranks
        self._ranges = Ranges(group.config)
        trace.has_ranges = self._ranges.always
        trace.record(trace.timeline)

    def close(self) -> None:
        """Stop counting; what was counted stays in the totals."""
        if self._statistics is not None:
            self._statistics.close(self.counters)
            self._statistics.close(self.lane_counters)

    def is_watching(self) -> bool:
        """Return whether somebody wants every operation: then none takes the shortest way."""
        return self.trace.watched or profiler_records()

    # -- threads of the program --------------------------------------------------------------

    def queued(self, operation: Operation) -> None:
        """Note that an operation was submitted."""
        timeline = self.trace.timeline
        if timeline is not None:
            timeline.negotiate_start(operation.name, operation.label)

    @contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """Surround a wait for another thread to run the operation.

        What the background thread does meanwhile does not count as hidden.
        """
        counters = self.counters
        before = 0.0 if counters is None else counters.in_background()
        try:
            with waiting(operation):
                yield
        finally:
            if counters is not None:
                counters.awaited += counters.in_background() - before

    def waited_for(self, operation: Operation, since: float) -> None:
        """Note that a thread has waited for the result since `since` (`perf_counter`)."""
        timeline = self.trace.timeline
        if timeline is not None:
            timeline.waited(operation.name, since)

    # -- a round -----------------------------------------------------------------------------

    def begin_background(self) -> float:
        """Note the beginning of a round for which no thread is known to wait.

        Returns:
            The seconds counted before the round, for `end_background`.
        """
        counters = self.counters
        if counters is None:
            return 0.0
        counters.background_since = time.monotonic()
        return counters.wait + counters.reduce

    def end_background(self, before: float) -> None:
        """Note the end of the round that `begin_background` began."""
        counters = self.counters
        if counters is not None:
            counters.background += counters.wait + counters.reduce - before
            counters.background_since = 0.0

    def begin_round(self) -> None:
        """Note that a round begins."""
        timeline = self.trace.timeline
        if timeline is not None:
            timeline.mark_cycle()

    def waited(self, since: float) -> float:
        """Count the time from `since` on as waiting for all ranks; return the time now."""
        now = time.monotonic()
        if self.counters is not None:
            self.counters.wait += now - since
        return now

    def settled(self, count: int, not_run: Iterable[Operation]) -> None:
        """Note that the ranks had to exchange whole queues for `count` operations.

        `not_run` has those of them that failed, or were completed by the exchange alone.
        """
        if self.counters is not None:
            self.counters.misses += count
        timeline = self.trace.timeline
        if timeline is not None:
            for operation in not_run:
                timeline.negotiate_end(operation.name)

    def agreed(self, operations: Sequence[Operation], first: int) -> float:
        """Note that all ranks run these operations now, as the collectives from `first` on.

        Returns:
            The time by `time.perf_counter`, for `arrived`; 0.0 if nobody wants to know it.
        """
        if not self.trace.watched:
            return 0.0
        now = time.perf_counter()
        timeline = self.trace.timeline
        if timeline is not None:
            for number, operation in enumerate(operations, first):
                timeline.negotiate_end(operation.name, now, self._set_id, number)
                timeline.start(operation.name, operation.label, now)
        return now

    def running(
        self, operations: Iterable[Operation], nbytes: int, transport: str
    ) -> AbstractContextManager[None]:
        """Surround operations that run together: profilers and the log see them."""
        if self._ranges.always or profiler_records():
            return self._ranges.around(list(operations), nbytes, transport)
        return _NOTHING

    def activity(self, name: str, activity: str) -> AbstractContextManager[None]:
        """Surround a phase of the operation with this name."""
        timeline = self.trace.timeline
        return _NOTHING if timeline is None else timeline.activity(name, activity)

    def reduced(
        self,
        since: float,
        nbytes: int = 0,
        media: tuple[str, ...] = (),
        reduces: bool = False,
        on_wire: int = 0,
    ) -> None:
        """Count the time from `since` on as moving these bytes, which `media` carried.

        `reduces` says whether they were reduced as well; over a network only `on_wire` bytes went.
        """
        counters = self.counters
        if counters is not None:
            counters.reduce += time.monotonic() - since
            if nbytes:
                counters.count(nbytes, media, reduces, on_wire)

    def reduced_inline(
        self, began: float, met: float, nbytes: int, saved: int, on_device: bool
    ) -> None:
        """Count an allreduce that took the shortest way; at the time `met` all ranks were there.

        Compression kept `saved` bytes off the network; `on_device` says that a device reduced.
        """
        counters = self.counters
        if counters is None:
            return
        counters.reduce += time.monotonic() - met
        counters.wait += met - began
        counters.operations += 1
        if on_device:
            counters.count_on_device(nbytes, nbytes)
        else:
            counters.bytes_inline += nbytes
        if saved:
            counters.save(saved)

    def ended(self, operations: Sequence[Operation]) -> None:
        """Note that these operations have their results."""
        if self.counters is not None:
            self.counters.operations += len(operations)
        timeline = self.trace.timeline
        if timeline is not None:
            for operation in operations:
                timeline.end(operation.name, operation.tensors)

    # -- devices, which end later ------------------------------------------------------------

    def begin_on_device(self, device: torch.device, stream: Any) -> DeviceTiming | None:
        """Mark the beginning of a device's work; None where nobody counts."""
        return None if self.counters is None else DeviceTiming(device, stream)

    def end_on_device(self, timing: DeviceTiming, stream: Any) -> Any:
        """Mark the end of that work; return an event that other streams may wait for."""
        event = timing.end(stream)
        if self.counters is not None:
            self.counters.timings.append(timing)
        return event

    # -- who submitted when ------------------------------------------------------------------

    @staticmethod
    def ages_of(operations: Sequence[Operation], agreed: float) -> list[int]:
        """Return how many microseconds before `agreed` this rank had submitted each operation.

        All ranks agree at the same moment, except for the time of a message, so ages before that
        moment can be compared without a common clock. The age is -1 for an operation that this rank
        never submitted because it has joined.
        """
        now = agreed - time.perf_counter() + time.monotonic()
        return [
            round((now - operation.submitted) * 1e6) if operation.signature else -1
            for operation in operations
        ]

    def arrived(
        self,
        operations: Sequence[Operation],
        first: int,
        agreed: float,
        ages: Sequence[Sequence[int]],
    ) -> None:
        """Record when each rank had submitted these operations, by the `ages` of all ranks."""
        timeline = self.trace.timeline
        if timeline is None:
            return
        for index, operation in enumerate(operations):
            for rank, theirs in zip(self._ranks, ages, strict=True):
                if theirs[index] >= 0:
                    ready = agreed - theirs[index] / 1e6
                    timeline.rank_ready(operation.name, rank, ready, first + index)
