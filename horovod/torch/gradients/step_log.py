"""Counting an optimizer's steps and recording each in the statistics and the timeline.

Used by `horovod.torch.gradients.reducer`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from horovod.engine.execution.heap import join_pages
from horovod.engine.runtime import runtime
from horovod.observe.statistics.counters import DeviceTiming
from horovod.observe.statistics.lane_timing import LaneTiming, StepRecorder
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.direct_reducer import DirectReducer

# After these steps the heap is put on huge pages: tensors find their memory in it in the first few,
# and other memory when the program changes.
_JOINING = frozenset(2**power for power in range(2, 11))


class StepLog:
    """The steps of one optimizer."""

    def __init__(self, params: Sequence[Named]) -> None:
        self.name = ""  # the optimizer's name, once the ranks have agreed on one
        self._uses_heap = any(param.is_cpu for _, param in params)
        self._num_steps = 0
        self._last_step = 0.0  # when the gradients of the step before were reduced
        self._backward: DeviceTiming | None = None  # this step's backward, on a device
        self._recorder: StepRecorder | None = None

    def begin_backward(self, device: torch.device) -> None:
        """Begin to measure a step's backward by the clock of its gradients' device."""
        self._backward = DeviceTiming(device)

    def end_backward(self, first_arrival: float, now: float, num_buckets: int) -> float:
        """Count backward, which has ended because the gradients are wanted.

        Args:
            first_arrival: When the first gradient was there; 0 if there was none.
            now: The time.
            num_buckets: The number of buckets.

        Returns:
            The seconds that backward took from the first gradient on.
        """
        seconds = now - first_arrival if first_arrival else 0.0
        timing, self._backward = self._backward, None
        if timing is not None:
            timing.end()
        runtime.statistics.add_backward(seconds, num_buckets, timing)
        return seconds

    def end_step(self, first_arrival: float, backward_ended: float) -> None:
        """Record a step: in the timeline it lasts from one exchange of gradients to the next."""
        self._num_steps += 1
        timeline, config = runtime.timeline, runtime.config
        if timeline is not None and self._last_step:
            backward = (first_arrival, backward_ended)
            timeline.step(self.name, self._num_steps, self._last_step, backward)
        self._last_step = time.perf_counter()
        joins = self._num_steps in _JOINING and config.keep_heap and config.huge_pages
        if joins and self._uses_heap:
            join_pages()

    def end_direct_step(
        self, direct: DirectReducer, first_arrival: float, now: float, timing: LaneTiming | None
    ) -> None:
        """Record a step whose buckets their hooks have begun; `timing` is there if it was timed."""
        self._backward = None
        seconds = now - first_arrival if first_arrival else 0.0
        runtime.statistics.add_backward(seconds, len(direct.buckets), direct.last_timing)
        self._num_steps += 1
        timeline = runtime.timeline
        if timeline is not None and timing is not None:
            if self._recorder is None:
                self._recorder = StepRecorder(self.name, direct.lane.device)
            self._recorder.add(timeline, self._num_steps, timing)
