"""Put the recordings of all ranks on one clock. `merging` and `analysis` use this.

Ranks of one host share its monotonic clock, whose value at the start is in each file, so their
times differ by that start alone. Clocks of different hosts are compared by what the ranks did. The
moment in which the ranks agree to run a collective is the same on all of them, except for the time
of a message, because no rank can know that all have come before the last one has. A collective that
a device began without an agreement ends at the same moment on all ranks. So every collective that
two hosts have in common is a comparison of their clocks, and a job makes thousands:

- the difference of two clocks is the median over the collectives of a stretch of time: a thread
  that was not scheduled at once after an agreement makes single comparisons wrong, not the median;
- it is kept within what causality allows: no rank agrees before another has submitted;
- clocks drift, by up to some ten microseconds a second, so every stretch has a median of its own,
  and between the middles of stretches the difference changes evenly.

The error that remains is about the time of a message between the hosts. For hosts without common
collectives, and for files of earlier versions, the hosts' time of day is used.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median

from horovod.observe.timeline.matching import by_key
from horovod.observe.timeline.recording import RecordedCollective, Recording, TimeSpan

MOST_STRETCHES = 50
LEAST_COMPARISONS = 20  # comparisons in a stretch, if there is more than one stretch
LEAST_STRETCH = 10e6  # microseconds: in less, delays would look like drift


@dataclass(frozen=True)
class Comparison:
    """One collective, seen on two clocks.

    No rank goes on before all have submitted, which bounds the difference of the clocks.
    """

    time: float  # when the ranks of the second host agreed, on its own clock
    difference: float  # of the clocks, if both hosts agreed at one moment
    least_difference: float
    most_difference: float


@dataclass(frozen=True)
class Difference:
    """The lead of one clock over another, known at some of its times and linear in between."""

    times: tuple[float, ...]
    leads: tuple[float, ...]

    def correct(self, time: float) -> float:
        """Return the other clock's reading at `time` on this one."""
        return time - self.lead_at(time)

    def lead_at(self, time: float) -> float:
        """Return how far this clock is ahead at `time`."""
        if len(self.times) == 1:
            return self.leads[0]
        right = min(max(bisect_right(self.times, time), 1), len(self.times) - 1)
        left = right - 1
        slope = (self.leads[right] - self.leads[left]) / (self.times[right] - self.times[left])
        return self.leads[left] + slope * (time - self.times[left])


def align(recordings: Sequence[Recording]) -> list[Recording]:
    """Return the recordings on one clock, on which the first event of all is at about 0."""
    clocks: dict[str, list[Recording]] = {}
    for recording in recordings:
        onto_host = partial(operator.add, recording.start)
        clocks.setdefault(clock_name(recording), []).append(move_times(recording, onto_host))
    names = list(clocks)
    aligned = clocks.pop(names[0])
    while clocks:  # the clock that has most in common with the aligned recordings comes first
        pairs = {name: compare(aligned, group) for name, group in clocks.items()}
        name = max(pairs, key=lambda each: len(pairs[each]))
        difference = estimate(pairs[name]) or _by_time_of_day(recordings, names[0], name)
        aligned += [move_times(recording, difference.correct) for recording in clocks.pop(name)]
    origin = min((_first_time(recording) for recording in aligned), default=0.0)
    shifted = [move_times(recording, lambda time: time - origin) for recording in aligned]
    return sorted(shifted, key=lambda recording: recording.rank)


def clock_name(recording: Recording) -> str:
    """Return a name that is equal for recordings of one clock."""
    return f"rank {recording.rank}" if recording.clock is None else f"host {recording.host}"


def compare(one: Sequence[Recording], other: Sequence[Recording]) -> list[Comparison]:
    """Compare two clocks by the collectives that both groups have, in the order of time."""
    ours, theirs = by_key(one), by_key(other)
    comparisons = []
    for key in ours.keys() & theirs.keys():
        here, there = list(ours[key].values()), list(theirs[key].values())
        met_here = [c.met for c in here if c.met is not None]
        met_there = [c.met for c in there if c.met is not None]
        if not met_here or not met_there:
            continue  # the recording ends inside of it
        comparisons.append(
            Comparison(
                time=min(met_there),
                difference=min(met_there) - min(met_here),
                least_difference=max(c.submitted for c in there) - min(met_here),
                most_difference=min(met_there) - max(c.submitted for c in here),
            )
        )
    return sorted(comparisons, key=lambda comparison: comparison.time)


def estimate(comparisons: Sequence[Comparison]) -> Difference | None:
    """Estimate how far the second clock is ahead of the first; None without comparisons."""
    if not comparisons:
        return None
    lasted = comparisons[-1].time - comparisons[0].time
    count = min(len(comparisons) // LEAST_COMPARISONS, int(lasted / LEAST_STRETCH))
    count = max(1, min(MOST_STRETCHES, count))
    bounds = [len(comparisons) * index // count for index in range(count + 1)]
    times: list[float] = []
    leads: list[float] = []
    for first, last in pairwise(bounds):
        stretch = comparisons[first:last]
        middle = median(each.time for each in stretch)
        if times and middle <= times[-1]:
            continue
        times.append(middle)
        leads.append(median(each.difference for each in stretch))
    medians = Difference(tuple(times), tuple(leads))
    # Shift the whole as little as causality demands. If no shift satisfies all comparisons, because
    # a clock was set or drifts unevenly, take the middle.
    least = max(each.least_difference - medians.lead_at(each.time) for each in comparisons)
    most = min(each.most_difference - medians.lead_at(each.time) for each in comparisons)
    shift = min(max(0.0, least), most) if least <= most else (least + most) / 2
    return Difference(medians.times, tuple(each + shift for each in medians.leads))


def move_times(recording: Recording, onto: Callable[[float], float]) -> Recording:
    """Return the recording with all its times on another clock, to which `onto` converts."""
    return replace(
        recording,
        collectives=[_move_collective(each, onto) for each in recording.collectives],
        waits=_move_spans(recording.waits, onto),
        steps={row: _move_spans(spans, onto) for row, spans in recording.steps.items()},
        backwards={row: _move_spans(spans, onto) for row, spans in recording.backwards.items()},
        cycles=[onto(time) for time in recording.cycles],
        ended=onto(recording.ended),
    )


def _move_collective(
    each: RecordedCollective, onto: Callable[[float], float]
) -> RecordedCollective:
    """Return a collective with its times on another clock."""
    return replace(
        each,
        submitted=onto(each.submitted),
        agreed=None if each.agreed is None else onto(each.agreed),
        started=None if each.started is None else onto(each.started),
        ended=None if each.ended is None else onto(each.ended),
        phases=_move_spans(each.phases, onto),
        ready={rank: onto(time) for rank, time in each.ready.items()},
    )


def _move_spans(spans: Sequence[TimeSpan], onto: Callable[[float], float]) -> list[TimeSpan]:
    """Return spans with their times on another clock."""
    return [replace(span, began=onto(span.began), ended=onto(span.ended)) for span in spans]


def _by_time_of_day(recordings: Sequence[Recording], first: str, name: str) -> Difference:
    """Return how far two clocks are apart if both hosts know the time of day."""

    def to_epoch(clock: str) -> float:
        one = next(r for r in recordings if clock_name(r) == clock)
        return float(one.started - one.start)

    return Difference((0.0,), (to_epoch(first) - to_epoch(name),))


def _first_time(recording: Recording) -> float:
    """Return the time of the first event of a recording."""
    times = [each.submitted for each in recording.collectives]
    times += [span.began for spans in recording.steps.values() for span in spans]
    times += [span.began for span in recording.waits] + recording.cycles
    return min(times, default=recording.ended)
