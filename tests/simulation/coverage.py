"""What simulated jobs have covered, for the end of a run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from tests.simulation.fixed_plan import FIXED_KINDS
from tests.simulation.plan import AGENT_KINDS, EVERYWHERE, KINDS, Result

PHASES = ("starting", "forming", "training", "waiting", "ending")
_YEAR = 365.25 * 24 * 3600
_TOGETHER = 60.0  # seconds within which two faults count as a pair


class Coverage:
    """Counts."""

    def __init__(self) -> None:
        self.jobs = 0
        self.seconds = 0.0
        self.generations = 0
        self._kinds: Counter[tuple[str, str]] = Counter()  # the job's phase, and the fault
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._decisions: Counter[str] = Counter()
        self._endings: Counter[str] = Counter()

    def add(self, result: Result) -> None:
        """Count a job."""
        self.jobs += 1
        self.seconds += result.seconds
        self.generations += result.generations
        self._kinds.update(result.moments)
        self._decisions.update(result.decisions)
        ended = "ended well" if result.status == 0 else "failed"
        self._endings[result.ending or ended] += 1
        for one, other in itertools.combinations(result.plan.faults, 2):
            if other.start < one.start + one.seconds + _TOGETHER:
                self._pairs[min(one.kind, other.kind), max(one.kind, other.kind)] += 1

    def report(self, minutes: float) -> Iterator[str]:
        """Tell it in lines."""
        yield (
            f"{self.jobs} jobs in {minutes:.1f} min ({self.jobs / minutes:.0f} a minute), "
            f"{self.seconds / _YEAR:.4f} virtual years, {self.generations} generations, "
            f"{self._kinds.total()} faults"
        )
        yield "faults in each phase of a job:"
        yield f"  {'':26}" + "".join(f"{phase:>10}" for phase in PHASES)
        for kind in dict.fromkeys((*KINDS, EVERYWHERE, *FIXED_KINDS, *AGENT_KINDS)):
            counts = [self._kinds[phase, kind] for phase in PHASES]
            yield f"  {kind:26}" + "".join(f"{count or '-':>10}" for count in counts)
        possible = (len(KINDS) + 1) * (len(KINDS) + 2) // 2 - 1  # one kind comes only once
        yield f"pairs of faults within {_TOGETHER:g} s: {len(self._pairs)} of {possible}"
        for title, counts in (("decisions", self._decisions), ("jobs that", self._endings)):
            yield title + ":"
            for name, count in counts.most_common():
                yield f"  {count:8} {name}"
