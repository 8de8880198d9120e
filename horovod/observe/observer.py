"""Tell statistics, timeline and profilers what the engine does, which has no other way to them.

Every channel has an `Observer`. Its rounds, its executor, the threads that wait and the prepared
reductions tell it what happens: what was queued, agreed on, begun, ended, in which bytes. Here, and
nowhere else in the engine, the time of a round is accounted for: until all ranks were there it is
waiting, after that it is reducing, and what the background thread does while no thread of the
program waits is hidden.
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
    """Who wants to see every operation of a job, such as its timeline while one is recorded."""

    timeline: Timeline | None = None
    members: dict[str, Sequence[str]] = field(default_factory=dict)  # of requests that are groups
    shares_arrivals: bool = False  # whether ranks tell each other when they submitted; all or none
    has_ranges: bool = False  # whether a tool or the log wants every operation
    watched: bool = False  # whether any of these is wanted: then nothing takes the shortest way

    def record(self, timeline: Timeline | None) -> None:
        """Record into this one from now on."""
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
        """Return whether every single operation is wanted: then none takes the shortest way."""
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

        What the background thread does meanwhile is waited for, not hidden.
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
        """Note that a thread has waited for the operation's result since then (`perf_counter`)."""
        timeline = self.trace.timeline
        if timeline is not None:
            timeline.waited(operation.name, since)

    # -- a round -----------------------------------------------------------------------------

    def begin_background(self) -> float:
        """Note the beginning of a round that, as far as is known, nobody waits for.

        Returns:
            What `end_background` needs: the seconds counted before the round.
        """
        counters = self.counters
        if counters is None:
            return 0.0
        counters.background_since = time.monotonic()
        return counters.wait + counters.reduce

    def end_background(self, before: float) -> None:
        """Note the end of that round."""
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
        """Count the time since then as waiting until all ranks were there; returns the time now."""
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
        """Note that all ranks run these now, the first as the collective of that number.

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
        """Surround a phase of the operation of that name."""
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
        """Count the time since then as moving these bytes, which `media` carried.

        `reduces` says whether they were reduced as well, `on_wire` what was left on a network.
        """
        counters = self.counters
        if counters is not None:
            counters.reduce += time.monotonic() - since
            if nbytes:
                counters.count(nbytes, media, reduces, on_wire)

    def reduced_inline(
        self, began: float, met: float, nbytes: int, saved: int, on_device: bool
    ) -> None:
        """Count, in one call, an allreduce that took the shortest way; all ranks `met` in it.

        Compression has kept `saved` bytes off the network. `on_device`: a device's library did it.
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
        """Mark the end of that work; returns an event that others may wait for."""
        event = timing.end(stream)
        if self.counters is not None:
            self.counters.timings.append(timing)
        return event

    # -- who submitted when ------------------------------------------------------------------

    @staticmethod
    def ages_of(operations: Sequence[Operation], agreed: float) -> list[int]:
        """Return how many microseconds before `agreed` this rank had submitted each operation.

        All ranks agree at the same time, as far as a message is fast, so that what tells how long
        before needs no clock that they share. -1 stands for what this rank never submitted, because
        it has joined.
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
        """Record when each rank had submitted these, from the `ages` of all ranks."""
        timeline = self.trace.timeline
        if timeline is None:
            return
        for index, operation in enumerate(operations):
            for rank, theirs in zip(self._ranks, ages, strict=True):
                if theirs[index] >= 0:
                    ready = agreed - theirs[index] / 1e6
                    timeline.rank_ready(operation.name, rank, ready, first + index)
