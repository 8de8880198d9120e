"""Count a job's collectives, and find for which ranks they waited and which transport they used.

Used by `analysis`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from horovod.observe.timeline.matching import Match
from horovod.observe.timeline.recording import Recording, TimeSpan


@dataclass(frozen=True)
class AwaitedCollective:
    """All collectives of one name, and how long ranks waited for each other in them."""

    name: str
    count: int
    nbytes: int | None  # bytes of one collective
    tensors: tuple[str, ...]
    spread: float  # microseconds between the first and the last rank, on average
    waited: float  # microseconds that all ranks together waited for the last one
    last_rank: int | None  # the rank that was the last most often
    last_share: float  # the share of the collectives in which it was


def find_awaited(matches: Sequence[Match]) -> list[AwaitedCollective]:
    """Return the collectives by name, those first that ranks waited for longest."""
    groups: dict[str, list[Match]] = {}
    for each in matches:
        groups.setdefault(each.name, []).append(each)
    rows = []
    for name, group in groups.items():
        ready = [each.ready.values() for each in group]
        last = Counter(each.last_rank for each in group if each.last_rank is not None)
        rank, times = last.most_common(1)[0] if last else (None, 0)
        parts = next(iter(group[-1].parts.values()))
        rows.append(
            AwaitedCollective(
                name=name,
                count=len(group),
                nbytes=group[-1].nbytes,
                tensors=tuple(parts.about.get("names", ())),
                spread=fmean(max(each) - min(each) for each in ready),
                waited=sum(max(each) - time for each in ready for time in each),
                last_rank=rank,
                last_share=times / len(group),
            )
        )
    return sorted(rows, key=lambda each: (-each.spread * each.count, each.name))


def find_transports(recordings: Sequence[Recording]) -> list[str]:
    """Return the names of the transports that carried the data, the most used first."""
    names = Counter(
        phase.what.rpartition("_")[0] for recording in recordings for phase in _moving(recording)
    )
    return [name for name, _ in names.most_common()]


def count_operations(recording: Recording, steps: Iterable[TimeSpan]) -> int:
    """Count how often data was moved and reduced in these steps.

    A collective of several tensors takes several operations if they do not fit the fusion buffer,
    and collectives that are fused take one together. A transport does one operation after the
    other, so phases that overlap are one operation, which is recorded in the row of each tensor.
    """
    begins: list[float] = []
    free = float("-inf")
    for phase in sorted(_moving(recording), key=lambda phase: (phase.began, phase.ended)):
        if phase.began >= free:
            begins.append(phase.began)
        free = max(free, phase.ended)
    return sum(bisect_left(begins, s.ended) - bisect_right(begins, s.began) for s in steps)


def _moving(recording: Recording) -> Iterable[TimeSpan]:
    """Yield the phases in which data is moved and reduced."""
    for each in recording.collectives:
        for phase in each.phases:
            if phase.what.endswith(f"_{each.kind}"):
                yield phase
