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

    def __init__(self, values: int, most: int) -> None:
        self.width = 1.0  # seconds of a bucket
        self._most = most
        self._size = 3 + values
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
        bucket = self._buckets.setdefault(int(at // self.width), [0.0] * self._size)
        bucket[0] = version
        bucket[1] += weight
        bucket[2] = max(bucket[2], peak)
        for index, value in enumerate(sums, 3):
            bucket[index] += value
        while len(self._buckets) > self._most:
            self._halve(version)

    def _halve(self, version: int) -> None:
        self.width *= 2
        old, self._buckets = self._buckets, {}
        for index, bucket in old.items():
            merged = self._buckets.setdefault(index // 2, [0.0] * self._size)
            merged[0] = self._reset = version
            merged[1] += bucket[1]
            merged[2] = max(merged[2], bucket[2])
            for value in range(3, self._size):
                merged[value] += bucket[value]

    def changes(self, since: int = 0) -> dict[str, Any] | None:
        """Return ``rows`` that are new or changed: start of the bucket, means, peak."""
        rows = [
            [
                index * self.width,
                *(float(f"{value / bucket[1]:.6g}") for value in bucket[3:]),
                round(bucket[2], 6),
            ]
            for index, bucket in sorted(self._buckets.items())
            if bucket[0] > since
        ]
        if not rows:
            return None
        return {"width": self.width, "reset": self._reset > since, "rows": rows}


class StepSeries(TimeSeries):
    """Mean step of all ranks over time: step, compute, wait, reduction; peak: the longest step."""

    def __init__(self) -> None:
        super().__init__(4, _MOST_BUCKETS)

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
        self.steps = TimeSeries(4, _MOST_BUCKETS_OF_RANK)
        self.use = TimeSeries(4, _MOST_BUCKETS_OF_RANK)

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
        use = (
            processor,
            stats.get("memory_bytes", 0.0),
            stats.get("gpu_use", 0.0),
            stats.get("gpu_memory_bytes", 0.0),
        )
        self.use.add(now, 1.0, use, processor, version)

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
