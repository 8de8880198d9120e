"""Searching for the settings with which training steps are shortest: HOROVOD_AUTOTUNE.

A `Tuner` knows nothing of training. It says which setting to use next, is told how long a step took
with it, and settles. A binding feeds it the same times on every rank
(`horovod.torch.gradients.autotune`), so all ranks use the same setting in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from horovod.common.exceptions import HorovodInternalError

Setting = TypeVar("Setting", bound=Hashable)

NUM_PAIRS = 5  # comparisons of the best setting found with the default, one after the other
_CLEAR_WINS = 4  # of them that the found setting must win,
_CLEAR_GAIN = 1.02  # and how many times as fast it must be in their median


class TunedSet(Protocol):
    """A process set whose way to run operations is searched for: see `Runtime.tuned_set`."""

    tuned: tuple[float, str | None] | None  # what was settled on: cycle time and algorithm

    @property
    def failure(self) -> HorovodInternalError | None:
        """Why nothing runs any more."""

    @property
    def num_joins(self) -> int:
        """How often all ranks have gone on after some had joined."""

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The ways to reduce among which `tune` chooses; the first is used at the beginning."""

    def tune(self, cycle_time: float, algorithm: str | None) -> None:
        """Run operations in this way from now on (milliseconds; None: no choice). Collective."""


class Tuner(Generic[Setting]):
    """Tries settings one after another; the default stays unless another is clearly better.

    `stages` are called in turn with the best setting known by then, and return what to try next: a
    stage per knob, say. Each setting gets one sample, `most_samples` in all with the default's.
    Then the best and the default are measured again, alternately: a lucky sample, or a machine
    that becomes slower in the course of the search, must not decide. The first `num_warmup`
    samples, with the default, count for nothing.
    """

    def __init__(
        self,
        default: Setting,
        stages: Sequence[Callable[[Setting], Iterable[Setting]]],
        num_warmup: int,
        most_samples: int,
    ) -> None:
        self.phase = "warm-up"  # then "search", "comparison" and "settled"
        self.best = default
        self.seconds = 0.0  # of a step with the best setting, once there are samples of it
        self._search = self._run(default, stages, num_warmup, most_samples)
        self.current = next(self._search)  # to be used until the next `add`

    @property
    def settled(self) -> bool:
        """Whether the search is over: `current` is the best setting and stays."""
        return self.phase == "settled"

    def add(self, seconds: float) -> None:
        """Note that a step with the current setting takes `seconds`."""
        if self.settled:
            raise ValueError("the search is over")
        try:
            self.current = self._search.send(seconds)
        except StopIteration:
            self.phase, self.current = "settled", self.best

    def _run(
        self,
        default: Setting,
        stages: Sequence[Callable[[Setting], Iterable[Setting]]],
        num_warmup: int,
        most_samples: int,
    ) -> Generator[Setting, float, None]:
        for _ in range(num_warmup):
            yield default
        self.phase = "search"
        times = {default: (yield default)}
        best = default
        for stage in stages:
            for candidate in stage(best):
                if candidate not in times and len(times) < most_samples:
                    times[candidate] = yield candidate
            best = min(times, key=times.__getitem__)
        self.seconds = times[default]
        if best == default:
            return
        self.phase = "comparison"
        olds, news = [], []
        for number in range(NUM_PAIRS):
            # Each is the first in turn, so that neither has an advantage in a drift.
            if number % 2:
                news.append((yield best))
            olds.append((yield default))
            if not number % 2:
                news.append((yield best))
        gains = [old / new if new > 0 else 1.0 for old, new in zip(olds, news, strict=True)]
        self.seconds = median(olds)
        if median(gains) > _CLEAR_GAIN and sum(gain > 1 for gain in gains) >= _CLEAR_WINS:
            self.best, self.seconds = best, median(news)


def median(values: Sequence[float]) -> float:
    """Return the median. The standard library's takes longer to import than this package."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
