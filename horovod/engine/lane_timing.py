"""How long the device took for one step's reductions on a lane, by its own clock.

The host runs ahead of the device, so its clock says nothing about them. Each piece of work knows
how long it took; marks in the program's own stream say when backward began and ended, and for how
long that stream then waited: what it did not wait for was hidden behind computing. Made by
`horovod.torch.direct_reducer` in each step, read by the statistics once the device is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from horovod.engine.device_clock import Mark
from horovod.engine.timeline import Timeline
from horovod.transport.process_group import DeviceWork


class LaneWork(NamedTuple):
    """One reduction."""

    name: str
    work: DeviceWork
    nbytes: int
    dtype: torch.dtype
    ready: Mark | None  # when its gradients were there, if somebody records a timeline


class LaneTiming:
    """One step of one optimizer, from its first gradient on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = Mark(device)
        self._asked: Mark | None = None  # the end of backward: the program needs the results
        self._waits: list[tuple[Mark, Mark]] = []
        self._works: list[LaneWork] = []
        self._is_complete = False  # whether nothing more is waited for in this step

    # -- during the step -------------------------------------------------------------------

    def end_backward(self) -> None:
        """The program needs the results from here on."""
        self._asked = Mark(self._device)

    def add(
        self,
        name: str,
        work: DeviceWork,
        nbytes: int,
        dtype: torch.dtype,
        is_recorded: bool = False,
    ) -> None:
        """A reduction was begun; for the timeline it is noted when that was."""
        ready = Mark(self._device) if is_recorded else None
        self._works.append(LaneWork(name, work, nbytes, dtype, ready))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what lets the program's stream wait for results."""
        began = Mark(self._device)
        try:
            yield
        finally:
            self._waits.append((began, Mark(self._device)))

    def complete(self) -> None:
        """All results of the step have been waited for."""
        self._is_complete = True

    # -- afterwards ------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether the device has done all of it."""
        if not self._is_complete:
            return False
        return not self._waits or self._waits[-1][1].has_passed()

    def seconds(self) -> tuple[float, float]:
        """Return how long the reductions took, and how much of that was hidden."""
        exposed = sum(began.seconds_until(ended) for began, ended in self._waits)
        took = self.reducing()
        return max(took, 0.0), max(0.0, took - exposed)

    def reducing(self) -> float:
        """Return how long the device was reducing."""
        durations = [each.work.duration() for each in self._works]
        if None in durations:  # a library that does not tell
            return sum(began.seconds_until(ended) for began, ended in self._waits)
        return sum(filter(None, durations))

    def backward(self) -> float:
        """Return how long after the first gradient the program needed the results."""
        return 0.0 if self._asked is None else self._first.seconds_until(self._asked)

    def measure(self) -> tuple[float, float]:
        """Wait until the device has done all of it; return what reducing and backward took."""
        if self._waits:
            self._waits[-1][1].wait()
        return self.reducing(), self.backward()

    def record(
        self, timeline: Timeline, anchor: Anchor, row: str, step: int, last: LaneTiming | None
    ) -> None:
        """Write the step into the timeline, once it is over.

        `row` is the optimizer's, `last` the step before this one.
        """
        ended = anchor.time_of(self._waits[-1][1])
        if last is not None and last._waits:
            asked = anchor.time_of(self._asked or self._first)
            backward = anchor.time_of(self._first), asked
            timeline.step(row, step, anchor.time_of(last._waits[-1][1]), backward, ended)
        for wait_began, wait_ended in self._waits:
            timeline.waited(row, anchor.time_of(wait_began), anchor.time_of(wait_ended))
        free = 0.0  # when the device could begin: reductions come one after the other
        for each in self._works:
            if each.ready is not None:
                ready = anchor.time_of(each.ready)
                began = max(ready, free)
                free = began + (each.work.duration() or 0.0)
                timeline.device_allreduce(each.name, each.nbytes, each.dtype, ready, began, free)


class Anchor:
    """Translates moments of a device into the host's time. Making one waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._mark = Mark(device)
        self._mark.wait()
        self._time = time.perf_counter()

    def time_of(self, mark: Mark) -> float:
        """Return when a moment was that has passed, by `time.perf_counter`."""
        return self._time + self._mark.seconds_until(mark)


class StepRecorder:
    """Writes the steps of one optimizer into the timeline, when the device is done with them."""

    def __init__(self, row: str, device: torch.device) -> None:
        self._row = row
        self._anchor = Anchor(device)
        self._steps: deque[tuple[int, LaneTiming]] = deque()
        self._last: LaneTiming | None = None

    def add(self, timeline: Timeline, number: int, timing: LaneTiming) -> None:
        """Write what is over, and remember this step."""
        self._steps.append((number, timing))
        while self._steps and self._steps[0][1].is_over():
            number, step = self._steps.popleft()
            step.record(timeline, self._anchor, self._row, number, self._last)
            self._last = step
