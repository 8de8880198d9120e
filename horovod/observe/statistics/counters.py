"""Count what one channel does, and time what devices do later than their host.

Counting is on in every job, so it is a few additions for each operation, made by the one thread
that runs it, and without a lock.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from horovod.observe.statistics.device_clock import Mark
from horovod.transport.base import DEVICE, NETWORK, SHARED_MEMORY

MOST_TIMINGS = 4096  # remembered operations that a device has not completed


@dataclass(slots=True, eq=False)
class Counters:
    """Counts of one channel. The thread that runs its rounds writes them; any thread may read."""

    media: tuple[str, ...] = ()  # what carries tensors in host memory
    wait: float = 0.0  # seconds until all ranks were there
    reduce: float = 0.0  # seconds of moving and reducing after that
    operations: int = 0
    misses: int = 0  # operations for which the ranks had to exchange whole queues
    bytes_inline: int = 0  # reduced in host memory by the shortest way: in none of the others
    bytes_reduced: int = 0
    bytes_moved: dict[str, int] = field(
        default_factory=lambda: {SHARED_MEMORY: 0, NETWORK: 0, DEVICE: 0}
    )
    # Rounds of the background thread: seconds that they waited and reduced, the time at which the
    # present one began (0 if there is none), and for how many of the seconds somebody waited.
    background: float = 0.0
    background_since: float = 0.0
    awaited: float = 0.0
    # Work that devices complete after this process has gone on; `settle` counts and removes it.
    timings: deque[Timing] = field(default_factory=lambda: deque(maxlen=MOST_TIMINGS))
    device_reduce: float = 0.0
    device_hidden: float = 0.0

    def settle(self) -> None:
        """Count what devices have completed. Threads of the program call this, one at a time."""
        while self.timings and self.timings[0].is_over():
            took, hidden = self.timings.popleft().seconds()
            self.device_reduce += took
            self.device_hidden += hidden

    def count(self, nbytes: int, media: tuple[str, ...], reduces: bool, on_wire: int) -> None:
        """Count the bytes of an operation, of which ``on_wire`` go over a network."""
        if reduces:
            self.bytes_reduced += nbytes
        for medium in media:
            self.bytes_moved[medium] += on_wire if medium == NETWORK else nbytes

    def count_on_device(self, nbytes: int, on_wire: int) -> None:
        """Count the bytes that a device's library has reduced, and those of them that it moved."""
        self.bytes_reduced += nbytes
        self.bytes_moved[DEVICE] += on_wire

    def save(self, nbytes: int) -> None:
        """Subtract bytes that compression has kept off the network, if there is a network."""
        if NETWORK in self.media:
            self.bytes_moved[NETWORK] -= nbytes

    def in_background(self) -> float:
        """Return the seconds of all rounds in the background so far."""
        since = self.background_since
        return self.background + (time.monotonic() - since if since else 0.0)

    def hidden(self) -> float:
        """Return the seconds of waiting and reducing while no thread of the program waited."""
        return max(0.0, min(self.in_background() - self.awaited, self.wait + self.reduce))


class Timing(Protocol):
    """The times of work that a device does some time after it got the work."""

    def is_over(self) -> bool:
        """Return whether the device has done all of it."""

    def seconds(self) -> tuple[float, float]:
        """Return how long it took, and how much of that was hidden behind computing."""

    def backward(self) -> float:
        """Return how long a backward pass took, from the first gradient on."""


class DeviceTiming:
    """Times the work of a device, from its beginning to `end`."""

    __slots__ = ("_asked", "_device", "_ended", "_started")

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._device = device
        self._started = Mark(device, stream)
        self._ended = self._started
        self._asked: Mark | None = None

    def end(self, stream: Any = None) -> Any:
        """Mark the end of the work, and return an event that others may wait for."""
        self._ended = Mark(self._device, stream)
        return self._ended.event

    def ask(self) -> None:
        """Mark the moment from which on the program needs the result."""
        if self._asked is None:
            self._asked = Mark(self._device)

    def is_over(self) -> bool:
        return self._ended.has_passed() and (self._asked is None or self._asked.has_passed())

    def seconds(self) -> tuple[float, float]:
        took = self._started.seconds_until(self._ended)
        if self._asked is None:
            return took, 0.0
        return took, min(took, max(0.0, self._started.seconds_until(self._asked)))

    def backward(self) -> float:
        return self.seconds()[0]


class Totals(NamedTuple):
    """The sum over the channels of a process."""

    wait: float = 0.0
    reduce: float = 0.0
    hidden: float = 0.0
    operations: int = 0
    misses: int = 0
    reduced: int = 0
    shared_memory: int = 0
    network: int = 0
    device: int = 0

    @classmethod
    def of(cls, counters: Counters) -> Totals:
        moved = dict(counters.bytes_moved)
        for medium in counters.media:
            moved[medium] += counters.bytes_inline
        return cls(
            counters.wait,
            counters.reduce + counters.device_reduce,
            counters.hidden() + counters.device_hidden,
            counters.operations,
            counters.misses,
            counters.bytes_reduced + counters.bytes_inline,
            moved[SHARED_MEMORY],
            moved[NETWORK],
            moved[DEVICE],
        )

    def plus(self, other: Totals) -> Totals:
        return Totals._make(a + b for a, b in zip(self, other, strict=True))
