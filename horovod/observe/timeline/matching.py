"""Find one collective in the files of all ranks, for `clocks`, `merging` and `analysis`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from horovod.observe.timeline.recording import Key, RecordedCollective, Recording


@dataclass
class Match:
    """One collective on all ranks that recorded it, on one clock."""

    name: str
    parts: dict[int, RecordedCollective]  # by rank
    ready: dict[int, float]  # when each rank submitted it, also ranks without a file

    @property
    def last_rank(self) -> int | None:
        """The rank that all others waited for; None if only one is known."""
        if len(self.ready) < 2:
            return None
        return max(self.ready, key=lambda rank: self.ready[rank])

    @property
    def last_ready(self) -> float | None:
        """When all ranks had submitted it; None if only one is known."""
        return max(self.ready.values()) if len(self.ready) > 1 else None

    @property
    def lateness(self) -> float:
        """How much later than the others (their median) the last rank came."""
        last = self.last_rank
        if last is None:
            return 0.0
        others = [time for rank, time in self.ready.items() if rank != last]
        return self.ready[last] - median(others)

    @property
    def nbytes(self) -> int | None:
        """The bytes of its tensors, if known."""
        known = [part.nbytes for part in self.parts.values() if part.nbytes is not None]
        return known[0] if known else None

    @property
    def agreed(self) -> float:
        """When it was agreed on, on the rank that knew first."""
        return min(part.agreed for part in self.parts.values() if part.agreed is not None)


def by_key(recordings: Sequence[Recording]) -> dict[tuple[Key, int], dict[int, RecordedCollective]]:
    """Return the agreed collectives of each rank, by key and occurrence of that key.

    A key may occur several times, because the ids of process sets are used again.
    """
    collectives: dict[tuple[Key, int], dict[int, RecordedCollective]] = {}
    for recording in recordings:
        seen: dict[Key, int] = {}
        for each in recording.collectives:
            if each.agreed is not None:
                seen[each.key] = seen.get(each.key, -1) + 1
                collectives.setdefault((each.key, seen[each.key]), {})[recording.rank] = each
    return collectives


def match(recordings: Sequence[Recording]) -> list[Match]:
    """Return the collectives of aligned recordings, in the order in which they were agreed on."""
    files = {recording.rank for recording in recordings}
    matches = []
    for ((_, _, name), _), parts in by_key(recordings).items():
        ready = {rank: part.submitted for rank, part in parts.items()}
        told: dict[int, list[float]] = {}
        for part in parts.values():
            for rank, time in part.ready.items():
                if rank not in files:
                    told.setdefault(rank, []).append(time)
        ready |= {rank: median(times) for rank, times in told.items()}
        matches.append(Match(name, parts, ready))
    return sorted(matches, key=lambda each: each.agreed)
