"""Measure, by the device's own clock, how long the reductions of one step on a lane take.

The host runs ahead of the device, so its clock says nothing about reductions. Marks in the
program's own stream say when backward began and ended, and how long that stream then waited; marks
in a stream beside it say when each reduction ended. The time that the program did not wait was
hidden behind computing. Marks cost the device some time (about 1 % of a step of ResNet-50), so
`horovod.torch.gradients.direct_reducer` measures a step now and then; the steps in between are
taken to be as long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from horovod.observe.statistics.device_clock import Mark
from horovod.observe.timeline.recorder import Timeline
from horovod.transport.device.process_group import DeviceWork


class TimedReduction(NamedTuple):
    """A reduction, with the marks of its beginning and end."""

    name: str
    nbytes: int
    dtype: torch.dtype
    ready: Mark  # when its gradients were there
    ended: Mark | None  # when the result was there; None where no mark says so


class LaneTiming:
    """Times one step of one optimizer, from its first gradient on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = Mark(device)
        self._asked: Mark | None = None  # the end of backward: the program needs the results
        self._waits: list[tuple[Mark, Mark]] = []
        self._reductions: list[TimedReduction] = []
        self._is_complete = False  # whether the program has waited for all results of this step
        self._seconds: tuple[float, float] | None = None

    # -- during the step -------------------------------------------------------------------

    def end_backward(self) -> None:
        """Note that the program needs the results from here on."""
        self._asked = Mark(self._device)

    def add(self, name: str, work: DeviceWork, nbytes: int, dtype: torch.dtype) -> None:
        """Note that a reduction was begun."""
        ready = Mark(self._device)
        ended = None
        if self._device.type != "cpu":
            stream = _stream_beside(self._device)
            with torch.get_device_module(self._device).stream(stream):
                work.wait()
            ended = Mark(self._device, stream)
        self._reductions.append(TimedReduction(name, nbytes, dtype, ready, ended))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surround a call that makes the program's stream wait for results."""
        began = Mark(self._device)
        try:
            yield
        finally:
            self._waits.append((began, Mark(self._device)))

    def complete(self) -> None:
        """Note that the program has waited for all results of the step."""
        self._is_complete = True

    # -- afterwards ------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Return whether the device has done all work of the step."""
        if not self._is_complete:
            return False
        return not self._waits or self._waits[-1][1].has_passed()

    def seconds(self) -> tuple[float, float]:
        """Return how long the reductions took, and how much of that was hidden."""
        if self._seconds is None:
            took = self.reducing()
            self._seconds = took, max(0.0, took - self._exposed())
        return self._seconds

    def _exposed(self) -> float:
        return sum(began.seconds_until(ended) for began, ended in self._waits)

    def reducing(self) -> float:
        """Return how long the device was reducing."""
        if not all(each.ended for each in self._reductions):
            return self._exposed()
        return sum(ended - began for _, began, ended in self._spans(self._first.seconds_until))

    def _spans(self, time_of: Any) -> Iterator[tuple[TimedReduction, float, float]]:
        """Yield each reduction with its beginning and end; the device does one after the other."""
        free = float("-inf")
        for each in self._reductions:
            if each.ended is not None:
                began = max(time_of(each.ready), free)
                free = max(began, time_of(each.ended))
                yield each, began, free

    def backward(self) -> float:
        """Return how long after the first gradient the program needed the results."""
        return 0.0 if self._asked is None else self._first.seconds_until(self._asked)

    def measure(self) -> tuple[float, float]:
        """Wait until the device has done all work; return the seconds of reducing and backward."""
        if self._waits:
            self._waits[-1][1].wait()
        return self.reducing(), self.backward()

    def record(
        self, timeline: Timeline, anchor: Anchor, row: str, step: int, last: LaneTiming | None
    ) -> None:
        """Write the step into the timeline, once it is over.

        `row` is the name of the optimizer, `last` the step before this one.
        """
        if not self._waits:
            return
        if last is not None and last._waits:
            asked = anchor.time_of(self._asked or self._first)
            backward = anchor.time_of(self._first), asked
            began, ended = last._waits[-1][1], self._waits[-1][1]
            timeline.step(row, step, anchor.time_of(began), backward, anchor.time_of(ended))
        for wait_began, wait_ended in self._waits:
            timeline.waited(row, anchor.time_of(wait_began), anchor.time_of(wait_ended))
        for each, started, finished in self._spans(anchor.time_of):
            ready = anchor.time_of(each.ready)
            name = f"allreduce.{each.name}"
            timeline.device_allreduce(name, each.nbytes, each.dtype, ready, started, finished)


class Anchor:
    """Translates moments of a device into the host's time. Making one waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._mark = Mark(device)
        self._mark.wait()
        self._time = time.perf_counter()

    def time_of(self, mark: Mark) -> float:
        """Return when the device passed a mark, by `time.perf_counter`."""
        return self._time + self._mark.seconds_until(mark)


class StepRecorder:
    """Writes the steps of one optimizer into the timeline, once the device has done them."""

    def __init__(self, row: str, device: torch.device) -> None:
        self._row = row
        self._anchor = Anchor(device)
        self._steps: deque[tuple[int, LaneTiming]] = deque()
        self._last: LaneTiming | None = None

    def add(self, timeline: Timeline, number: int, timing: LaneTiming) -> None:
        """Remember this step, and write the steps that are over."""
        self._steps.append((number, timing))
        while self._steps and self._steps[0][1].is_over():
            number, step = self._steps.popleft()
            step.record(timeline, self._anchor, self._row, number, self._last)
            self._last = step


_streams: dict[torch.device, Any] = {}


def _stream_beside(device: torch.device) -> Any:
    """Return a stream of the device that does nothing but wait for results."""
    if device not in _streams:
        _streams[device] = torch.get_device_module(device).Stream(device)
    return _streams[device]
