"""The numbers behind `hvd.stats()`: what this process has done, counted all the time.

Channels count what they do in `Counters`, optimizers tell `Statistics` about steps, scripts about
their metrics; `hvd.stats()` and the reporter (`horovod.engine.reporter`) read. Counting is on in
every job, so it is a few additions for each operation, made by the one thread that runs it, and
without a lock. docs/stats.md says what each number means.
"""

from __future__ import annotations

import numbers
import operator
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from horovod.engine.device_clock import Mark
from horovod.transport.base import DEVICE, NETWORK, SHARED_MEMORY

LONGEST_NAME = 200  # characters of a metric's name
MOST_NAMES = 100  # metrics of a process
MOST_VALUES = 200  # of a metric that are kept between two reports
MOST_STEPS = 50  # in a report
KEPT_STEPS = 256  # between two reports

_RATE_STEPS = 20  # steps over which their number per second is taken
_MOST_TIMINGS = 4096  # of operations that a device has not completed
_SAMPLE_SECONDS = 1.0  # between looks at the memory of the GPU, which take tens of microseconds


@dataclass(slots=True, eq=False)
class Counters:
    """What one channel has done. Written by the thread that runs its rounds, read by any."""

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
    # Rounds of the background thread: their seconds of waiting and reducing, when the present
    # one began (0: there is none), and how many of these seconds somebody waited for.
    background: float = 0.0
    background_since: float = 0.0
    awaited: float = 0.0
    # What devices complete later than this process goes on. Emptied by `settle`.
    timings: deque[Timing] = field(default_factory=lambda: deque(maxlen=_MOST_TIMINGS))
    device_reduce: float = 0.0
    device_hidden: float = 0.0

    def settle(self) -> None:
        """Count what devices have completed. In threads of the program, one at a time."""
        while self.timings and self.timings[0].is_over():
            took, hidden = self.timings.popleft().seconds()
            self.device_reduce += took
            self.device_hidden += hidden

    def count(self, nbytes: int, media: tuple[str, ...], reduces: bool, on_wire: int) -> None:
        """Bytes of an operation, and what is left of them on a network."""
        if reduces:
            self.bytes_reduced += nbytes
        for medium in media:
            self.bytes_moved[medium] += on_wire if medium == NETWORK else nbytes

    def count_on_device(self, nbytes: int, on_wire: int) -> None:
        """Bytes that a device's library has reduced, and how many of them it moved."""
        self.bytes_reduced += nbytes
        self.bytes_moved[DEVICE] += on_wire

    def save(self, nbytes: int) -> None:
        """Compression has kept so many of the bytes off the network, if there is one."""
        if NETWORK in self.media:
            self.bytes_moved[NETWORK] -= nbytes

    def in_background(self) -> float:
        """Seconds of rounds in the background so far."""
        since = self.background_since
        return self.background + (time.monotonic() - since if since else 0.0)

    def hidden(self) -> float:
        """Seconds of waiting and reducing during which no thread of the program waited."""
        return max(0.0, min(self.in_background() - self.awaited, self.wait + self.reduce))


class Timing(Protocol):
    """The times of work that a device does later than it was given it."""

    def is_over(self) -> bool:
        """Whether the device has done all of it."""

    def seconds(self) -> tuple[float, float]:
        """Return how long it took, and how much of that was hidden behind computing."""


class DeviceTiming:
    """Marks of a device around work. `ask` is where the program's own work needs the result."""

    __slots__ = ("_asked", "_device", "_ended", "_started")

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._device = device
        self._started = Mark(device, stream)
        self._ended = self._started
        self._asked: Mark | None = None

    def end(self, stream: Any = None) -> Any:
        """The work ends here. Returns an event that others may wait for."""
        self._ended = Mark(self._device, stream)
        return self._ended.event

    def ask(self) -> None:
        """The program needs the result from here on."""
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
        """Return how long it took: for work that is a backward pass."""
        return self.seconds()[0]


class BackwardTiming(Protocol):
    """The times of a step's backward pass on a device."""

    def is_over(self) -> bool:
        """Whether the device has done all of it."""

    def backward(self) -> float:
        """Return how long it took from the first gradient on."""


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


class Step(NamedTuple):
    """One step of an optimizer."""

    number: int
    end: float  # by `time.monotonic`
    seconds: float
    backward: float
    wait: float
    reduce: float
    hidden: float


class Statistics:
    """The numbers of this process since `init`; those of an elastic job go on in its next one."""

    def __init__(self) -> None:
        self.enabled = True  # a switch for benchmarks, read when a channel is made and by steps
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Begin at zero."""
        self._counters: list[Counters] = []
        self._past = Totals()  # of channels that are closed
        self.began = time.monotonic()
        self.steps = 0
        self.step_seconds = 0.0
        self.backward_seconds = 0.0
        self.buckets = 0
        self.gpu_memory = 0
        self.gpu_uuid = ""  # as NVIDIA's tools write it; empty: no GPU, or not known
        self._sampled = 0.0
        self._recent: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._in_steps = [0.0, 0.0, 0.0]  # seconds of waiting, reducing, and hidden ones of these
        self._last = Totals()  # at the end of the last step
        self._last_end = 0.0  # when that was; 0: nothing is known of the step that goes on
        self._backward = 0.0  # seconds of the step that goes on
        self._device_backward: deque[BackwardTiming] = deque(maxlen=_MOST_TIMINGS)
        self.metrics: dict[str, deque[tuple[int, float]]] = {}

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it

    # -- channels --------------------------------------------------------------------------

    def open(self, media: tuple[str, ...]) -> Counters | None:
        """The counters of a new channel; None while nothing is counted."""
        if not self.enabled:
            return None
        counters = Counters(media)
        with self._lock:
            self._counters.append(counters)
        return counters

    def close(self, counters: Counters | None) -> None:
        """The channel is closed; what it has done stays in the totals."""
        with self._lock:
            if counters in self._counters:
                self._counters.remove(counters)
                self._past = self._past.plus(Totals.of(counters))

    def totals(self) -> Totals:
        """The sum over all channels."""
        with self._lock:
            return self._sum()

    def _sum(self) -> Totals:
        totals = self._past
        for counters in self._counters:
            totals = totals.plus(Totals.of(counters))
        return totals

    # -- steps -----------------------------------------------------------------------------

    def reform(self) -> None:
        """The next step begins among other ranks: what was before it does not belong to it."""
        self._last_end = self._backward = 0.0

    def add_backward(
        self, seconds: float, buckets: int, on_device: BackwardTiming | None = None
    ) -> None:
        """Gradients came for so many seconds until now; they are reduced in so many buckets.

        A device computes them later, and takes the time `on_device`.
        """
        if self.enabled:
            if on_device is None:
                self._backward += seconds
            else:
                self._device_backward.append(on_device)
            self.buckets += buckets
            if not self._last_end:
                with self._lock:
                    self._last = self._sum()
                self._last_end = time.monotonic() - seconds

    def end_step(self, buckets: int = 0) -> None:
        """An optimizer has made a step. The seam for all bindings; any thread may call."""
        if not self.enabled:
            return
        now = time.monotonic()
        with self._lock:
            wait, reduce, hidden = self._past[:3]
            for counters in self._counters:  # without the sum of everything
                counters.settle()
                wait += counters.wait
                reduce += counters.reduce + counters.device_reduce
                hidden += counters.hidden() + counters.device_hidden
            while self._device_backward and self._device_backward[0].is_over():
                self._backward += self._device_backward.popleft().backward()
            last_end, last = self._last_end, self._last
            if not last_end:  # a first step without a beginning: nothing can be said of it
                last_end, last = now, Totals(wait, reduce, hidden)
            seconds = now - last_end
            waited = max(0.0, wait - last.wait)
            reduced = max(0.0, reduce - last.reduce)
            was_hidden = max(0.0, hidden - last.hidden)
            self.steps += 1
            self._recent.append(
                Step(self.steps, now, seconds, self._backward, waited, reduced, was_hidden)
            )
            self._last = Totals(wait, reduce, hidden)
            self._last_end = now
            self.step_seconds += seconds
            self.backward_seconds += self._backward
            self._in_steps[0] += waited
            self._in_steps[1] += reduced
            self._in_steps[2] += was_hidden
            self.buckets += buckets
            self._backward = 0.0
        if now - self._sampled > _SAMPLE_SECONDS:
            self.sample_devices()

    def recent(self) -> list[Step]:
        """The last steps, oldest first."""
        return list(self._recent.copy())

    def steps_per_second(self) -> float:
        """Over the last steps."""
        recent = self.recent()[-_RATE_STEPS - 1 :]
        if len(recent) < 2 or recent[-1].end <= recent[0].end:
            return 0.0
        return (len(recent) - 1) / (recent[-1].end - recent[0].end)

    def summary(self) -> str:
        """One line for the end of a job."""
        totals = self.totals()
        seconds, parts = max(time.monotonic() - self.began, 1e-9), list(totals[:3])
        what = f"{totals.operations} operations in {seconds:.1f} s"
        if self.steps and self.step_seconds:
            seconds, parts = self.step_seconds, self._in_steps
            what = f"{self.steps} steps in {seconds:.1f} s ({self.steps / seconds:.3g} steps/s)"
        wait, reduce, hidden = (100 * part / seconds for part in parts)
        return (
            f"{what}: {wait:.1f} % of the time waiting for other ranks, {reduce:.1f} % reducing "
            f"({hidden:.1f} % hidden behind computing), {totals.reduced / 1e6:.4g} MB reduced"
        )

    # -- memory ----------------------------------------------------------------------------

    def sample_devices(self) -> None:
        """Look at what GPUs have done, and at their memory.

        In threads of the program only: it calls torch.
        """
        self._sampled = time.monotonic()
        with self._lock:
            for counters in self._counters:
                counters.settle()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.gpu_memory = int(torch.cuda.memory_allocated())
            if not self.gpu_uuid:
                device = torch.cuda.get_device_properties(torch.cuda.current_device())
                self.gpu_uuid = f"GPU-{getattr(device, 'uuid', '')}"

    # -- metrics ---------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any], step: Any) -> None:
        """Keep a script's own numbers for the next report; ValueError before any is kept."""
        checked = {_name(name): _number(name, value) for name, value in values.items()}
        at = self.steps if step is None else _step(step)
        with self._lock:
            if len(self.metrics.keys() | checked.keys()) > MOST_NAMES:
                raise ValueError(
                    f"hvd.stats.log() takes {MOST_NAMES} different names at most, and "
                    f"{next(iter(checked.keys() - self.metrics.keys()))!r} would be one more: do "
                    f"not make numbers part of a name, give them as step="
                )
            for name, value in checked.items():
                self.metrics.setdefault(name, deque(maxlen=MOST_VALUES)).append((at, value))

    def take_metrics(self) -> dict[str, list[tuple[int, float]]]:
        """What was logged since the last call."""
        with self._lock:
            taken = {name: list(values) for name, values in self.metrics.items() if values}
            for name in taken:
                self.metrics[name].clear()
        return taken


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux: the most that it has been
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return pages * resource.getpagesize()


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the name of a metric must be text, not {name!r:.100}")
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"the name of a metric has {LONGEST_NAME} characters at most; "
            f"{name[:40]!r}... has {len(name)}"
        )
    return name


def _number(name: str, value: Any) -> float:
    """A number, or the only element of a tensor of any framework."""
    found = value
    try:
        for method in ("item", "asscalar", "numpy"):  # torch, numpy, JAX; MXNet; TensorFlow
            if not isinstance(found, numbers.Real) and callable(getattr(found, method, None)):
                found = getattr(found, method)()
        found = found.item() if hasattr(found, "item") else found
        if isinstance(found, numbers.Real):
            return float(found)
    except OverflowError:
        return float("inf") if found > 0 else float("-inf")
    except Exception as error:
        raise ValueError(
            f"metric {name!r}: {type(value).__name__} is not one number: {error}"
        ) from error
    raise ValueError(
        f"metric {name!r} must be a number or a tensor of one element, not "
        f"{type(value).__name__}: {value!r:.100}"
    )


def _step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise ValueError(f"step must be a whole number, not {step!r:.100}") from None
    if number < 0:
        raise ValueError(f"step must not be negative: {number}")
    return number
