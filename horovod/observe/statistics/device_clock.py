"""Mark moments in the work of a device, which runs behind the host that gives it the work.

Used for statistics, autotuning and the timeline. The CPU is a device as well here, whose moments
pass as soon as they are marked.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Mark:
    """A moment in the work of a stream, by default of the device's current one."""

    __slots__ = ("_event", "_time")

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._event: Any = None
        self._time = 0.0
        if device.type == "cpu":
            self._time = time.perf_counter()
            return
        module = torch.get_device_module(device)
        self._event = module.Event(enable_timing=True)
        self._event.record(module.current_stream(device) if stream is None else stream)

    @property
    def event(self) -> Any:
        """The device's event, which other streams may wait for; None on a CPU."""
        return self._event

    def has_passed(self) -> bool:
        """Return whether the device has reached this moment."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Let the host wait until the device has reached this moment."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: Mark) -> float:
        """Return how long after this moment the later one was; both have passed."""
        if self._event is None:
            return later._time - self._time
        return float(self._event.elapsed_time(later._event)) / 1000
