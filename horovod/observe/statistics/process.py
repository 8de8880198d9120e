"""Count what this process does, all the time: the numbers behind `hvd.stats()`.

Channels count what they do in `Counters`, optimizers tell `Statistics` about steps, scripts about
their metrics; `hvd.stats()` and the reporter (`horovod.observe.statistics.reporter`) read.
docs/stats.md says what each number means.
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
from pathlib import Path
from typing import Any, NamedTuple

import torch

from horovod.observe.statistics.counters import MOST_TIMINGS, Counters, Timing, Totals

MOST_NAMES = 100  # metrics of a process
LONGEST_NAME = 200  # characters of a metric's name
MOST_VALUES = 200  # values of a metric that are kept between two reports
MOST_STEPS = 50  # steps in a report
KEPT_STEPS = 256  # steps that are kept between two reports

_RATE_STEPS = 20  # steps over which their number per second is taken
_SAMPLE_SECONDS = 1.0  # between looks at the memory of the GPU, which take tens of microseconds


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
    """The numbers of this process since `init`; re-forming an elastic job keeps them."""

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
        self._in_steps = [0.0, 0.0, 0.0]  # seconds of waiting, of reducing, and of hidden work
        self._last = Totals()  # at the end of the last step
        self._last_end = 0.0  # when that was; 0: nothing is known about the present step
        self._backward = 0.0  # seconds in the present step
        self._device_backward: deque[Timing] = deque(maxlen=MOST_TIMINGS)
        self.metrics: dict[str, deque[tuple[int, float]]] = {}

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it

    # -- channels --------------------------------------------------------------------------

    def open(self, media: tuple[str, ...]) -> Counters | None:
        """Return counters for a new channel; None while nothing is counted."""
        if not self.enabled:
            return None
        counters = Counters(media)
        with self._lock:
            self._counters.append(counters)
        return counters

    def close(self, counters: Counters | None) -> None:
        """Remove the counters of a closed channel; what it has done stays in the totals."""
        with self._lock:
            if counters in self._counters:
                self._counters.remove(counters)
                self._past = self._past.plus(Totals.of(counters))

    def totals(self) -> Totals:
        """Return the sum over all channels."""
        with self._lock:
            return self._sum()

    def _sum(self) -> Totals:
        totals = self._past
        for counters in self._counters:
            totals = totals.plus(Totals.of(counters))
        return totals

    # -- steps -----------------------------------------------------------------------------

    def reform(self) -> None:
        """Forget the present step: the next one begins among other ranks."""
        self._last_end = self._backward = 0.0

    def add_backward(self, seconds: float, buckets: int, on_device: Timing | None = None) -> None:
        """Count a backward pass that ends now.

        Args:
            seconds: The seconds since its first gradient.
            buckets: The number of buckets in which its gradients are reduced.
            on_device: The times of the pass, if a device computes it later.
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
        """Count a step of an optimizer. All bindings call this, from any thread."""
        if not self.enabled:
            return
        now = time.monotonic()
        with self._lock:
            wait, reduce, hidden = self._past[:3]
            for counters in self._counters:  # cheaper than `_sum`, which adds up everything
                counters.settle()
                wait += counters.wait
                reduce += counters.reduce + counters.device_reduce
                hidden += counters.hidden() + counters.device_hidden
            while self._device_backward and self._device_backward[0].is_over():
                self._backward += self._device_backward.popleft().backward()
            last_end, last = self._last_end, self._last
            if not last_end:  # the first step, whose beginning is not known: it counts 0 seconds
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
        """Return the last steps, oldest first."""
        return list(self._recent.copy())

    def steps_per_second(self) -> float:
        """Return the number of steps per second, over the last steps."""
        recent = self.recent()[-_RATE_STEPS - 1 :]
        if len(recent) < 2 or recent[-1].end <= recent[0].end:
            return 0.0
        return (len(recent) - 1) / (recent[-1].end - recent[0].end)

    def summary(self) -> str:
        """Return one line for the end of a job."""
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
        """Count what GPUs have done, and read how much of their memory is in use.

        Only threads of the program may call this, because it calls torch.
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
        """Keep a script's own numbers for the next report; if one is wrong, raise ValueError."""
        checked = {_check_name(name): _check_number(name, value) for name, value in values.items()}
        at = self.steps if step is None else _check_step(step)
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
        """Return what was logged since the last call."""
        with self._lock:
            taken = {name: list(values) for name, values in self.metrics.items() if values}
            for name in taken:
                self.metrics[name].clear()
        return taken


def resident_bytes() -> int:
    """Return how many bytes of this process are in RAM."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux: the most that it has been
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return pages * resource.getpagesize()


def _check_name(name: Any) -> str:
    """Return the name of a metric; ValueError if it cannot be one."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the name of a metric must be text, not {name!r:.100}")
    if len(name) > LONGEST_NAME:
        has = f"{name[:40]!r}... has {len(name)}"
        raise ValueError(f"the name of a metric has {LONGEST_NAME} characters at most; {has}")
    return name


def _check_number(name: str, value: Any) -> float:
    """Return a number, or the only element of a tensor of any framework; ValueError otherwise."""
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
        kind = type(value).__name__
        raise ValueError(f"metric {name!r}: {kind} is not one number: {error}") from error
    told = f"{type(value).__name__}: {value!r:.100}"
    raise ValueError(f"metric {name!r} must be a number or a tensor of one element, not {told}")


def _check_step(step: Any) -> int:
    """Return the number of a step; ValueError if it is none."""
    try:
        number = operator.index(step)
    except TypeError:
        raise ValueError(f"step must be a whole number, not {step!r:.100}") from None
    if number < 0:
        raise ValueError(f"step must not be negative: {number}")
    return number
