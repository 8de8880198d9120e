"""Name what can be wrong with a job, and compute how much time a usual step loses to which cause.

`analysis` and the modules that give advice use this.

In synchronous training a step lasts as long as the rank that computes longest, plus the exchange
that nothing hides. Causes are taken off the computing time one after the other, so that no
microsecond is counted twice:

- cores: how much shorter the longest computation would be if every rank had a core when it wanted
  one;
- slow ranks: how much shorter it would then be without the ranks that are slow in all steps;
- turns: how much longer the slowest of the remaining ranks takes than the rank in the middle;
- computing: the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median

from horovod.observe.reports.slow_ranks import RECORDED, SlowRanks, find_slow_ranks
from horovod.observe.reports.splitting import StepSplit


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
