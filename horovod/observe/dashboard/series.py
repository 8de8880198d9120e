"""Keep what the charts show in bounded memory: the longer the job, the coarser its beginning.

`board` fills these series. Each knows what has changed since a version of the board, so that an
open page gets new points only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from horovod.observe.dashboard.reports import Report, ReportedStep

_MOST_BUCKETS = 480
_MOST_BUCKETS_OF_RANK = 120
_MOST_POINTS = 800
_MOST_NAMES = 32


class TimeSeries:
    """Means over time, in buckets of one second, later of two, four and more."""

    def __init__(self, most: int) -> None:
        self.width = 1.0  # seconds of a bucket
        self._most = most
        self._buckets: dict[int, list[float]] = {}  # version, weight, peak, then sums
        self._reset = 0

    def add(
        self, at: float, weight: float, sums: Sequence[float], peak: float, version: int
    ) -> None:
        """Add the values of one moment.

        Args:
            at: The time in seconds.
            weight: The number of values that each sum is made of.
            sums: The sums, from which means are made.
            peak: A value of which the largest is kept.
            version: The version of the board.
        """
        self._merge(int(at // self.width), [version, weight, peak, *sums])
        while len(self._buckets) > self._most:
            self.width *= 2
            self._reset = version
            old, self._buckets = self._buckets, {}
            for index, bucket in old.items():
                self._merge(index // 2, [version, *bucket[1:]])

    def _merge(self, index: int, values: list[float]) -> None:
        """Merge values into a bucket."""
        bucket = self._buckets.setdefault(index, values)
        if bucket is not values:
            sums = [one + other for one, other in zip(bucket, values, strict=True)]
            self._buckets[index] = [values[0], sums[1], max(bucket[2], values[2]), *sums[3:]]

    def changes(self, since: int = 0) -> dict[str, Any] | None:
        """Return ``rows`` that are new or changed: start of the bucket, means, peak."""
        rows = []
        for index, (changed, weight, peak, *sums) in sorted(self._buckets.items()):
            if changed > since:
                means = [float(f"{value / weight:.6g}") for value in sums]
                rows.append([index * self.width, *means, round(peak, 6)])
        if not rows:
            return None
        return {"width": self.width, "reset": self._reset > since, "rows": rows}


class StepSeries(TimeSeries):
    """Mean step of all ranks over time: step, compute, wait, reduction; peak: the longest step."""

    def __init__(self) -> None:
        super().__init__(_MOST_BUCKETS)

    def add_steps(self, steps: Sequence[ReportedStep], offset: float, version: int) -> None:
        """Add steps of one rank, whose clock is behind ours by ``offset`` seconds."""
        for step, weight in zip(steps, _weights(steps), strict=True):
            parts = step.total, step.compute, step.wait, step.exposed
            sums = [weight * part for part in parts]
            self.add(step.end + offset, weight, sums, step.total, version)


def _weights(steps: Sequence[ReportedStep]) -> list[float]:
    """Return how many steps each step in a report stands for.

    The report of a fast job has the longest step first and then the last ones, which stand for all
    that came after it.
    """
    if len(steps) < 2:
        return [1.0] * len(steps)
    each = max(1.0, (steps[-1].number - steps[0].number) / (len(steps) - 1))
    return [1.0, *[each] * (len(steps) - 1)]


class RankHistory:
    """One rank over time: its steps, and what its process uses."""

    def __init__(self) -> None:
        self.steps = TimeSeries(_MOST_BUCKETS_OF_RANK)
        self.use = TimeSeries(_MOST_BUCKETS_OF_RANK)

    def take(self, report: Report, processor: float | None, now: float, version: int) -> None:
        """Add a report; ``processor`` is how many cores the rank kept busy since the last one."""
        steps, stats = report.steps, report.stats
        if steps:
            weights = _weights(steps)
            sums = [
                sum(w * getattr(step, part) for step, w in zip(steps, weights, strict=True))
                for part in ("total", "compute", "wait", "exposed")
            ]
            peak = max(step.total for step in steps)
            self.steps.add(now, sum(weights), sums, peak, version)
        if processor is None:
            return
        use = [stats.get(key, 0.0) for key in ("memory_bytes", "gpu_use", "gpu_memory_bytes")]
        self.use.add(now, 1.0, [processor, *use], processor, version)

    def changes(self, since: int = 0) -> dict[str, Any]:
        """Return ``steps`` as in `StepSeries`, and ``use``: processor, memory, GPU, GPU memory."""
        return {"steps": self.steps.changes(since), "use": self.use.changes(since)}


class MetricSeries:
    """The metrics that the script logs, by step, from the lowest rank that logs each name."""

    def __init__(self) -> None:
        self._series: dict[str, _Points] = {}

    def add(
        self, name: str, rank: int, points: Iterable[tuple[float, float]], version: int
    ) -> None:
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= _MOST_NAMES:
                return
            series = self._series[name] = _Points(rank)
        if rank < series.rank:
            series = self._series[name] = _Points(rank, version)
        if rank == series.rank:
            series.extend(points, version)

    def latest(self) -> dict[str, float]:
        return {name: each.points[-1][1] for name, each in self._series.items() if each.points}

    def changes(self, since: int) -> dict[str, Any]:
        found = {}
        for name, series in self._series.items():
            new = [[step, value] for step, value, version in series.points if version > since]
            if new:
                found[name] = {"reset": series.reset > since, "points": new, "rank": series.rank}
        return found


class _Points:
    """One curve: first it keeps every point, then every second, every fourth and so on."""

    def __init__(self, rank: int, version: int = 0) -> None:
        self.rank = rank
        self.reset = version
        self.points: list[tuple[float, float, int]] = []
        self._stride = 1
        self._seen = 0

    def extend(self, points: Iterable[tuple[float, float]], version: int) -> None:
        for step, value in points:
            if self._seen % self._stride == 0:
                self.points.append((step, value, version))
            self._seen += 1
        while len(self.points) > _MOST_POINTS:
            self._stride *= 2
            self.points = [(step, value, version) for step, value, _ in self.points[::2]]
            self.reset = version
