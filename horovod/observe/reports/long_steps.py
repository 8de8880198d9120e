"""Describe steps that are much longer than the others: how long, how often, which rank was last.

Examples are an evaluation, a checkpoint, or a log that one rank writes while the others wait. Used
by `analysis`, which keeps them apart from the usual steps, and by `advice`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import median

from horovod.observe.reports.splitting import StepSplit

# A long step takes at least `LONG_STEP` times the median, and its distance from the median is at
# least `_OUTSIDE` times the usual (median) distance.
LONG_STEP, _OUTSIDE = 2.5, 9.0
WARM_UP = 5  # steps at the beginning that may be long without meaning anything
_REGULAR = 0.75  # the share of distances between long steps that a period must explain


class Where(Enum):
    """The part of a step that made the step long."""

    ONE_RANK = "one rank came late"
    ALL_RANKS = "all ranks took long"
    EXCHANGE = "the exchange of gradients took long"
    CORES = "a rank had no core"


@dataclass(frozen=True)
class LongStep:
    """One long step."""

    step: StepSplit
    excess: float  # microseconds beyond the median
    where: Where
    last: int  # the rank that computed longest

    @property
    def reason(self) -> str:
        """Words for the part that was long, with the rank if only one was concerned."""
        whose = f" (rank {self.last})" if self.where in (Where.ONE_RANK, Where.CORES) else ""
        return f"{self.where.value}{whose}"


@dataclass(frozen=True)
class LongSteps:
    """All long steps, except those at the beginning."""

    steps: tuple[LongStep, ...] = ()
    warm_up: int = 0  # the number of those at the beginning

    @property
    def numbers(self) -> list[int]:
        """The numbers of the steps."""
        return [each.step.number for each in self.steps]

    def excess(self, *, of_cores: bool | None = None) -> float:
        """Return the excess of the steps that lacked a core, of all others, or of all (None)."""
        return sum(
            each.excess
            for each in self.steps
            if of_cores is None or (each.where is Where.CORES) == of_cores
        )

    @property
    def counted(self) -> list[LongStep]:
        """The steps that have another reason than a lack of cores."""
        return [each for each in self.steps if each.where is not Where.CORES]

    @property
    def period(self) -> int | None:
        """The usual distance between two long steps; None if distances are irregular."""
        distances = [b - a for a, b in pairwise(each.step.number for each in self.counted)]
        if len(distances) < 2:
            return None
        usual = round(median(distances))
        if usual < 2:
            return None
        slack = 0.05 * usual
        # Twice the distance counts too: one long step may have passed for a usual one.
        near = [min(abs(each - usual), abs(each - 2 * usual)) <= slack for each in distances]
        return usual if sum(near) >= _REGULAR * len(near) else None

    @property
    def where(self) -> Where:
        """The part that accounts for most of the excess time."""
        excess: Counter[Where] = Counter()
        for each in self.counted:
            excess[each.where] += round(each.excess)
        return excess.most_common(1)[0][0]

    @property
    def last(self) -> tuple[int, int] | None:
        """The rank that came late in most of them, and in how many; None if no rank did."""
        late = [each.last for each in self.counted if each.where is Where.ONE_RANK]
        if not late:
            return None
        rank, times = Counter(late).most_common(1)[0]
        return (rank, times) if times > len(late) / 2 else None


def set_apart(steps: Sequence[StepSplit]) -> tuple[list[StepSplit], LongSteps]:
    """Return the usual steps, and the long ones."""
    if not steps:
        return [], LongSteps()
    durations = [step.duration for step in steps]
    middle = median(durations)
    distance = median(abs(each - middle) for each in durations)
    limit = max(LONG_STEP * middle, middle + _OUTSIDE * distance)
    usual = [step for step in steps if step.duration <= limit]
    first = {step.number for step in steps[:WARM_UP]}
    long = [step for step in steps if step.duration > limit]
    rest = [step for step in long if step.number not in first]
    length = median(step.duration for step in usual)
    exchange = median(step.duration - max(step.computes.values()) for step in usual)
    long_steps = tuple(_explain(step, length, exchange) for step in rest)
    return usual, LongSteps(long_steps, len(long) - len(rest))


def _explain(step: StepSplit, usual: float, usual_exchange: float) -> LongStep:
    """Find the part that made a step long, given how long a step and its exchange usually are."""
    excess = step.duration - usual
    computes = step.computes
    last = max(computes, key=lambda rank: computes[rank])
    others = [value for rank, value in computes.items() if rank != last]
    if last in step.ranks and (step.ranks[last].starved or 0.0) > excess / 2:
        where = Where.CORES
    elif step.duration - computes[last] - usual_exchange > excess / 2:
        where = Where.EXCHANGE
    elif others and computes[last] - median(others) > excess / 2:
        where = Where.ONE_RANK
    else:
        where = Where.ALL_RANKS
    return LongStep(step, excess, where, last)
