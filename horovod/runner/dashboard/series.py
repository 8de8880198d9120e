"""What the charts show, in bounded memory: the longer the job, the coarser its beginning.

`board` fills these. Each knows what has changed since a version of the board, so that a page that
is open gets new points only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod.runner.dashboard.reports import ReportedStep

_MOST_BUCKETS = 480
_MOST_POINTS = 800
_MOST_NAMES = 32


class StepSeries:
    """Mean step of all ranks over time: buckets of one second, later of two, four, ..."""

    def __init__(self) -> None:
        self.width = 1.0  # seconds of a bucket
        self._buckets: dict[int, list[float]] = {}  # count, total, compute, wait, exposed, version
        self._reset = 0

    def add(self, steps: Iterable[ReportedStep], offset: float, version: int) -> None:
        """Steps of one rank, whose clock is behind ours by ``offset`` seconds."""
        for step in steps:
            index = int((step.end + offset) // self.width)
            bucket = self._buckets.setdefault(index, [0.0] * 6)
            for place, value in enumerate((1.0, step.total, step.compute, step.wait, step.exposed)):
                bucket[place] += value
            bucket[5] = version
        if len(self._buckets) > _MOST_BUCKETS:
            self._halve(version)

    def _halve(self, version: int) -> None:
        while len(self._buckets) > _MOST_BUCKETS:
            self.width *= 2
            old, self._buckets = self._buckets, {}
            for index, bucket in old.items():
                merged = self._buckets.setdefault(index // 2, [0.0] * 6)
                for place in range(5):
                    merged[place] += bucket[place]
                merged[5] = version
        self._reset = version

    def changes(self, since: int) -> dict[str, Any] | None:
        """``rows`` of start, step, compute, wait, reduction (means, seconds), new or changed."""
        rows = [
            [index * self.width, *(round(value / bucket[0], 6) for value in bucket[1:5])]
            for index, bucket in sorted(self._buckets.items())
            if bucket[5] > since
        ]
        if not rows:
            return None
        return {"width": self.width, "reset": self._reset > since, "rows": rows}


class MetricSeries:
    """What the script logs: value by step, of the lowest rank that logs that name."""

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
    """One curve: every point at first, then every second, every fourth, ..."""

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
