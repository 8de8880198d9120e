"""HOROVOD_AUTOTUNE: DistributedOptimizer measures its steps and looks for a faster way to reduce.

`horovod.torch.gradients.reducer` calls `StepTuner.after_step` after each reduction. What is tuned:
whether buckets are reduced while backward goes on, how large they are, how long the background
thread lets requests gather, and the algorithm, where the transport has several. Knobs that the user
has set are left alone.

Ranks always use the same setting in the same step. After a number of steps they exchange the time
of a step; the slowest rank's counts, and from it `horovod.engine.autotune.Tuner` concludes the same
on all. Only one optimizer tunes at a time: with two, neither would know which made a step faster.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from horovod.common.logging import get_logger
from horovod.common.process_sets import ProcessSet
from horovod.engine.arguments import set_id
from horovod.engine.autotune import TunedSet, Tuner, median
from horovod.engine.autotune_log import AutotuneLog
from horovod.engine.runtime import runtime
from horovod.torch.gradients.agreement import TUNABLE, Agreement, greatest
from horovod.torch.gradients.bucketing import MEBIBYTE, OVERLAP_KNOB, SIZE_KNOB, Bucketing, cut
from horovod.torch.gradients.buckets import Named

logger = get_logger(__name__)

BUCKET_SIZES = [size * MEBIBYTE for size in (32, 16, 8, 4, 2, 1, 64, 128)]
CYCLE_TIMES = [0.0, 1.0, 5.0]  # milliseconds

_UNMEASURED = 1  # steps after a change that do not count: what is new takes longer

# The knob behind each algorithm.
_ALGORITHMS = {
    "direct": "shm_peer_memory",
    "staged": "shm_peer_memory",
    "hierarchical": "hierarchical_allreduce",
    "flat": "hierarchical_allreduce",
}
_CYCLE_KNOB = "cycle_time"

_active: weakref.ref[StepTuner] | None = None  # the tuner at work: there is one at a time


@dataclass(frozen=True)
class Setting:
    """One way to reduce gradients."""

    overlap: bool  # reduce buckets while backward goes on, or all gradients together after it
    bucket_bytes: int
    cycle_time: float  # milliseconds
    algorithm: str | None  # None: the transport has but one


def for_overlap_alone(agreed: Agreement) -> Agreement:
    """Return terms of a short search that decides only whether to reduce beside backward."""
    fixed = frozenset(TUNABLE) - {OVERLAP_KNOB}
    return replace(agreed, num_warmup=1, num_steps=5, most_samples=2, fixed=fixed)


# -- what is tried ---------------------------------------------------------------------------

Stage = Callable[[Setting], Iterator[Setting]]


def stages(
    default: Setting,
    params: Sequence[Named],
    grouped: bool,
    agreed: Agreement,
    algorithms: Sequence[str],
) -> list[Stage]:
    """Return what to try, knob by knob. With `grouped`, the user says what the buckets are."""

    def buckets(best: Setting) -> Iterator[Setting]:
        if OVERLAP_KNOB in agreed.fixed:
            return
        if agreed.spare_cores or any(not param.is_cpu for _, param in params):
            sizes = [default.bucket_bytes]
            if not grouped and SIZE_KNOB not in agreed.fixed:
                sizes += BUCKET_SIZES
            tried = set()
            for size in sizes:
                nbytes = [param.nbytes for _, param in params]
                form = tuple(map(len, cut(nbytes, size, agreed.fusion_threshold)))
                if form not in tried:
                    tried.add(form)
                    yield replace(best, overlap=True, bucket_bytes=size)
        yield replace(best, overlap=False, bucket_bytes=default.bucket_bytes)

    def cycle_times(best: Setting) -> Iterator[Setting]:
        if best.overlap and _CYCLE_KNOB not in agreed.fixed:
            for cycle_time in CYCLE_TIMES:
                yield replace(best, cycle_time=cycle_time)

    def algorithm(best: Setting) -> Iterator[Setting]:
        for name in algorithms:
            if _ALGORITHMS[name] not in agreed.fixed:
                yield replace(best, algorithm=name)

    return [buckets, cycle_times, algorithm]


# -- measuring -------------------------------------------------------------------------------


class StepClock:
    """Measures steps: on an accelerator by its own clock, because Python runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Note that a step ends here."""
        if self._device.type == "cpu":
            self.marks.append(time.perf_counter())
            return
        module = torch.get_device_module(self._device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """Return the times from mark to mark, once the device has reached the last."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self._device.type == "cpu":
            return [end - start for start, end in pairs]
        self.marks[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


class StepTuner:
    """Tunes the reduction of one optimizer's gradients."""

    def __init__(
        self,
        name: str,
        params: Sequence[Named],
        default: Bucketing,
        *,
        grouped: bool,
        agreed: Agreement,
        process_set: ProcessSet,
    ) -> None:
        self._name = name
        self._params = list(params)
        self._default = default
        self._grouped = grouped
        self._agreed = agreed
        self._process_set, self._own_rank = process_set, process_set.rank()
        self._tuned_set: TunedSet = runtime.tuned_set(set_id(process_set))
        self._joins = self._tuned_set.num_joins
        devices = [param.device for _, param in params if not param.is_cpu]
        self._clock = StepClock(devices[0] if devices else torch.device("cpu"))
        self._num_bytes = sum(param.nbytes for _, param in params)
        self._tuner: Tuner[Setting] | None = None  # None until other optimizers have settled
        self._log: AutotuneLog | None = None

    @property
    def settled(self) -> bool:
        return self._tuner is not None and self._tuner.settled

    def after_step(self) -> Setting | None:
        """Note that a step has ended; return how to reduce from now on, if that changes."""
        if self._joins != self._tuned_set.num_joins:  # those that joined early made fewer steps
            self._joins = self._tuned_set.num_joins
            self._clock.marks.clear()
        self._clock.mark()
        if len(self._clock.marks) <= _UNMEASURED + self._agreed.num_steps:
            return None
        mine = median(self._clock.seconds()[_UNMEASURED:])
        self._clock.marks.clear()
        other = _active() if _active is not None else None
        settled = other is None or other.settled or other._tuned_set.failure is not None
        busy_here = other is not self and not settled
        (seconds, busy), present = greatest([mine, float(busy_here)], self._process_set)
        if not all(present):  # a rank has joined, which could not know the outcome
            return None
        if self._tuner is None:
            return None if busy else self._begin()
        return self._learn(self._tuner, seconds)

    def _begin(self) -> Setting:
        global _active
        _active = weakref.ref(self)
        tuned_set, config = self._tuned_set, runtime.config
        names = tuned_set.algorithms if any(param.is_cpu for _, param in self._params) else ()
        way = config.cycle_time, names[0] if names else None
        agreed = self._agreed
        if tuned_set.tuned is not None:  # the first optimizer has settled: do as it found
            way, names = tuned_set.tuned, ()
            agreed = replace(agreed, fixed=agreed.fixed | {_CYCLE_KNOB})
        default = Setting(self._default.overlap, self._default.bucket_bytes, *way)
        tried = stages(default, self._params, self._grouped, agreed, names)
        self._tuner = Tuner(default, tried, agreed.num_warmup, agreed.most_samples)
        if self._own_rank == 0 and config.autotune_log:
            self._log = AutotuneLog(config.autotune_log)
        tuned_set.tune(*way)
        return default

    def _learn(self, tuner: Tuner[Setting], seconds: float) -> Setting | None:
        before, phase = tuner.current, tuner.phase
        tuner.add(seconds)
        if phase != "warm-up":
            self._write(before, seconds, phase)
        if tuner.settled:
            self._tuned_set.tuned = tuner.best.cycle_time, tuner.best.algorithm
            self._write(tuner.best, tuner.seconds, "best")
            if self._own_rank == 0:
                logger.info("autotune: %s settled on %s", self._name, tuner.best)
        if tuner.current == before:
            return None
        self._tuned_set.tune(tuner.current.cycle_time, tuner.current.algorithm)
        return tuner.current

    def _write(self, setting: Setting, seconds: float, phase: str) -> None:
        if self._log is None:
            return
        config = runtime.config
        by_host = "hierarchical" in self._tuned_set.algorithms
        row = {
            "hierarchical_allreduce": int(setting.algorithm == "hierarchical"),
            "hierarchical_allgather": int(by_host and config.hierarchical_allgather is not False),
            "torus_allreduce": 0,
            "cache_enabled": int(config.cache_capacity > 0),
            "cycle_time_ms": f"{setting.cycle_time:g}",
            "tensor_fusion_threshold": f"{setting.bucket_bytes / MEBIBYTE:g}",
            "score": f"{self._num_bytes / (1e6 * seconds):.6g}" if seconds > 0 else "0",
            "overlap": int(setting.overlap),
            "algorithm": setting.algorithm or "",
            "step_ms": f"{1000 * seconds:.6g}",
            "phase": phase,
            "optimizer": self._name,
        }
        self._log.add(row)
