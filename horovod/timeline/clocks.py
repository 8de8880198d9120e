"""One clock for all ranks. Used by `merging` and `analysis`.

Ranks of one host share its monotonic clock, whose value at the start is in each file, so their
times differ by nothing but that. Clocks of different hosts are compared by what the ranks did: the
moment in which the ranks of a collective agree to run it is the same on all of them, as far as a
message is fast, for no rank can know that all have come before the last one has. What a device does
without asking first, ranks end at the same moment. Every collective that two hosts have in common
is therefore a comparison of their clocks, and a job makes thousands:

- the difference of two hosts is the median over the collectives of a stretch of time: a thread
  that was not scheduled at once when the agreement came makes single ones wrong, not the median;
- it is kept within what causality allows: no rank agrees before another has submitted;
- clocks drift, by up to some ten microseconds a second, so every stretch has a median of its own,
  and between the middles of stretches the difference changes evenly.

What remains is about the time of a message between the hosts. Without collectives in common, and
in files of earlier versions, the hosts' time of day is taken at its word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from horovod.timeline.matching import by_key
from horovod.timeline.recording import Collective, Phase, Recording, TimeSpan

MOST_STRETCHES = 50
LEAST_COMPARISONS = 20  # in a stretch, if there is more than one
LEAST_STRETCH = 10e6  # microseconds: in less, delays would look like drift


@dataclass(frozen=True)
class Comparison:
    """One collective, seen on two clocks."""

    at: float  # when the ranks of the second host had met, on its own clock
    difference: float  # of the clocks, if that was the same moment on both
    least: float  # what the difference can be at least and at most,
    most: float  # because nobody goes on before all have submitted


@dataclass(frozen=True)
class Difference:
    """How far a clock is ahead of another, at some of its times; linear in between."""

    at: tuple[float, ...]
    ahead: tuple[float, ...]

    def correct(self, time: float) -> float:
        """The other clock's reading at `time` on this one."""
        return time - self.ahead_at(time)

    def ahead_at(self, time: float) -> float:
        if len(self.at) == 1:
            return self.ahead[0]
        right = min(max(bisect_right(self.at, time), 1), len(self.at) - 1)
        left = right - 1
        slope = (self.ahead[right] - self.ahead[left]) / (self.at[right] - self.at[left])
        return self.ahead[left] + slope * (time - self.at[left])


def align(recordings: Sequence[Recording]) -> list[Recording]:
    """The same recordings on one clock, on which the first event of all is at about 0."""
    clocks: dict[str, list[Recording]] = {}
    for recording in recordings:
        clocks.setdefault(clock_name(recording), []).append(moved(recording, _onto_host(recording)))
    names = list(clocks)
    placed = clocks.pop(names[0])
    waiting = dict(clocks)
    while waiting:  # those who have most in common with what is placed come first
        pairs = {name: compare(placed, group) for name, group in waiting.items()}
        name = max(pairs, key=lambda each: len(pairs[each]))
        group = waiting.pop(name)
        difference = estimate(pairs[name])
        if difference is None:
            difference = _by_time_of_day(recordings, names[0], name)
        placed += [moved(recording, difference.correct) for recording in group]
    origin = min((_first(recording) for recording in placed), default=0.0)
    shifted = [moved(recording, lambda time: time - origin) for recording in placed]
    return sorted(shifted, key=lambda recording: recording.rank)


def clock_name(recording: Recording) -> str:
    """Equal for recordings of one clock."""
    return f"rank {recording.rank}" if recording.clock is None else f"host {recording.host}"


def compare(one: Sequence[Recording], other: Sequence[Recording]) -> list[Comparison]:
    """The collectives that both have, in the order of time."""
    ours, theirs = by_key(one), by_key(other)
    found = []
    for key in ours.keys() & theirs.keys():
        here, there = list(ours[key].values()), list(theirs[key].values())
        met_here = [c.met for c in here if c.met is not None]
        met_there = [c.met for c in there if c.met is not None]
        if not met_here or not met_there:
            continue  # the recording ends inside of it
        found.append(
            Comparison(
                at=min(met_there),
                difference=min(met_there) - min(met_here),
                least=max(c.submitted for c in there) - min(met_here),
                most=min(met_there) - max(c.submitted for c in here),
            )
        )
    return sorted(found, key=lambda comparison: comparison.at)


def estimate(comparisons: Sequence[Comparison]) -> Difference | None:
    """How far the second clock is ahead of the first; None if nothing tells."""
    if not comparisons:
        return None
    lasted = comparisons[-1].at - comparisons[0].at
    count = min(len(comparisons) // LEAST_COMPARISONS, int(lasted / LEAST_STRETCH))
    count = max(1, min(MOST_STRETCHES, count))
    bounds = [len(comparisons) * index // count for index in range(count + 1)]
    at: list[float] = []
    ahead: list[float] = []
    for first, last in pairwise(bounds):
        stretch = comparisons[first:last]
        middle = median(each.at for each in stretch)
        if at and middle <= at[-1]:
            continue
        at.append(middle)
        ahead.append(median(each.difference for each in stretch))
    found = Difference(tuple(at), tuple(ahead))
    least = max(each.least - found.ahead_at(each.at) for each in comparisons)
    most = min(each.most - found.ahead_at(each.at) for each in comparisons)
    shift = min(max(0.0, least), most) if least <= most else (least + most) / 2
    return Difference(found.at, tuple(each + shift for each in found.ahead))


def moved(recording: Recording, onto: Callable[[float], float]) -> Recording:
    """The recording with all times on another clock."""
    return replace(
        recording,
        collectives=[_moved_collective(each, onto) for each in recording.collectives],
        waits=_moved_spans(recording.waits, onto),
        steps={row: _moved_spans(spans, onto) for row, spans in recording.steps.items()},
        backwards={row: _moved_spans(spans, onto) for row, spans in recording.backwards.items()},
        cycles=[onto(time) for time in recording.cycles],
        ended=onto(recording.ended),
    )


def _moved_collective(each: Collective, onto: Callable[[float], float]) -> Collective:
    def maybe(time: float | None) -> float | None:
        return None if time is None else onto(time)

    return replace(
        each,
        submitted=onto(each.submitted),
        agreed=maybe(each.agreed),
        started=maybe(each.started),
        ended=maybe(each.ended),
        phases=[Phase(phase.name, onto(phase.began), onto(phase.ended)) for phase in each.phases],
        ready={rank: onto(time) for rank, time in each.ready.items()},
    )


def _moved_spans(spans: Sequence[TimeSpan], onto: Callable[[float], float]) -> list[TimeSpan]:
    return [replace(span, began=onto(span.began), ended=onto(span.ended)) for span in spans]


def _onto_host(recording: Recording) -> Callable[[float], float]:
    """From microseconds since the recording's start to the host's own clock."""
    start = recording.started if recording.clock is None else recording.clock
    return lambda time: time + start


def _by_time_of_day(recordings: Sequence[Recording], first: str, name: str) -> Difference:
    """How far the clocks are apart if both hosts know the time of day."""

    def to_epoch(clock: str) -> float:
        one = next(r for r in recordings if clock_name(r) == clock)
        return float(one.started - (one.started if one.clock is None else one.clock))

    return Difference((0.0,), (to_epoch(first) - to_epoch(name),))


def _first(recording: Recording) -> float:
    times = [each.submitted for each in recording.collectives]
    times += [span.began for spans in recording.steps.values() for span in spans]
    times += [span.began for span in recording.waits] + recording.cycles
    return min(times, default=recording.ended)
