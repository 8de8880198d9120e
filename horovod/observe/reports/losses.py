"""Name what can be wrong with a job, and compute how much time its steps lose to which cause.

`analysis` and the modules that give advice use this. Steps that are much longer than the others are
set apart (`set_apart`): examples are an evaluation, a checkpoint, or a log that one rank writes
while the others wait.

All other steps are taken apart (`find_losses`). In synchronous training a step lasts as long as the
rank that computes longest, plus the exchange that nothing hides. Causes are taken off the computing
time one after the other, so that no microsecond is counted twice:

- cores: how much shorter the longest computation would be if every rank had a core when it wanted
  one;
- slow ranks: how much shorter it would then be without the ranks that are slow in all steps;
- turns: how much longer the slowest of the remaining ranks takes than the rank in the middle;
- computing: the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from statistics import fmean, median

from horovod.observe.reports.slow_ranks import RECORDED, SlowRanks, find_slow_ranks
from horovod.observe.reports.splitting import StepSplit

# A long step takes at least `LONG_STEP` times the median, and its distance from the median is at
# least `_OUTSIDE` times the usual (median) distance.
LONG_STEP, _OUTSIDE = 2.5, 9.0
WARM_UP = 5  # steps at the beginning that may be long without meaning anything
_REGULAR = 0.75  # the share of distances between long steps that a period must explain


class Fault(Enum):
    """A kind of advice, with the least share of the run that it must cost to be given.

    Even a job without any fault loses something to each of them: to chance, to the operating
    system, and to the recording itself.
    """

    LONG_STEPS = "long steps", 0.03
    SLOW_RANKS = "slow ranks", 0.05
    CORES = "no cores", 0.10
    TURNS = "late in turn", 0.10
    INPUT = "input", 0.06
    SMALL_OPERATIONS = "small operations", 0.05
    NETWORK = "network", 0.06
    EXCHANGE = "exchange", 0.20
    NEGOTIATION = "negotiation", 0.10

    def __init__(self, _: str, worth: float) -> None:
        self.worth = worth


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    fault: Fault
    subject: str
    number: str  # what was measured
    action: str
    cost: float  # microseconds of the recording that the fault costs, at most


@dataclass(frozen=True)
class Losses:
    """The microseconds that a usual step has, on average, and those that it loses to each cause."""

    step: float
    computing: float  # of a rank in the middle: advice cannot make it shorter
    turns: float
    slow_ranks: SlowRanks | None
    cores: float  # while ranks computed, and while they exchanged gradients
    exchange: float  # what remains of the step: the exchange that nothing hides


def find_losses(usual: Sequence[StepSplit]) -> Losses | None:
    """Take usual steps apart; None if there are none."""
    steps = _comparable(usual)
    if not steps:
        return None
    step = fmean(each.duration for each in steps)
    computes = [each.computes for each in steps]
    own = [
        {rank: time - starved[rank] for rank, time in times.items()}
        for times, starved in zip(computes, (each.starved for each in steps), strict=True)
    ]
    longest = fmean(max(times.values()) for times in computes)
    undisturbed = fmean(max(times.values()) for times in own)
    by_rank = {rank: [times[rank] for times in own] for rank in own[0]}
    slow = find_slow_ranks(by_rank, RECORDED.least_gap(step))
    others = set(by_rank) - set(slow.ranks if slow is not None else ())
    rest = [[times[rank] for rank in others] for times in own]
    starved_exchanging = fmean(_starved_exchanging(each) for each in steps)
    exchange = max(0.0, step - longest)
    lost_there = min(exchange, starved_exchanging)
    return Losses(
        step=step,
        computing=fmean(median(times) for times in rest),
        turns=fmean(max(times) - median(times) for times in rest),
        slow_ranks=slow,
        cores=longest - undisturbed + lost_there,
        exchange=exchange - lost_there,
    )


def _comparable(steps: Sequence[StepSplit]) -> list[StepSplit]:
    """Return the steps that have all ranks: the file of one rank may end earlier."""
    ranks = {rank for step in steps for rank in step.computes}
    return [step for step in steps if step.computes.keys() == ranks]


def _starved_exchanging(step: StepSplit) -> float:
    """Return how long ranks had no core while they did not compute: the median of the ranks."""
    return median((each.starved or 0.0) - each.starved_computing for each in step.ranks.values())


# -- long steps: how long, how often, which rank was last ----------------------------------------


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
