"""Advise what to try first, in sentences that have the measurements behind them.

Used by `text` and `page`. Each piece of advice says what its subject costs in the whole recording,
and the most expensive comes first. A subject that costs no more than every job loses is left out:
see `faults`. `tests/observe/reports/test_faults.py` measures how often advice is right.
"""

from __future__ import annotations

from statistics import fmean

from horovod.observe.reports.amounts import milliseconds, percent
from horovod.observe.reports.analysis import Analysis
from horovod.observe.reports.exchange_advice import advise_on_exchange
from horovod.observe.reports.faults import Advice
from horovod.observe.reports.rank_advice import advise_on_ranks
from horovod.observe.reports.splitting import PARTS

ALL_COMPUTE = 0.97  # the share of compute in a step from which on Horovod cannot gain anything


def advise(analysis: Analysis) -> list[Advice]:
    """Return what could make the job faster, the most expensive first."""
    losses = analysis.losses
    if losses is None:
        return []
    run = analysis.run_time
    candidates = [*advise_on_ranks(analysis, losses), *advise_on_exchange(analysis, losses)]
    given = [each for each in candidates if each.cost >= each.fault.worth * run]
    return sorted(given, key=lambda advice: -advice.cost)


def verdict(analysis: Analysis) -> str:
    """Return one sentence on the whole job."""
    if not analysis.steps:
        return "No steps were found: record while training runs."
    shares = {part: fmean(analysis.share(rank, part) for rank in analysis.ranks) for part in PARTS}
    step = milliseconds(analysis.overall("duration"))
    told = f"{percent(shares['compute'], 1)} of a step of {step} is compute"
    long = analysis.long_steps.excess(of_cores=False)
    longs = f" Long steps take {percent(long, analysis.run_time)} of the run." if long else ""
    if shares["compute"] >= ALL_COMPUTE:
        return f"{told}: Horovod has nothing left to gain; look at the model and its data.{longs}"
    words = {
        "wait": "waiting for other ranks",
        "reduction": "reductions that nothing hides",
        "negotiation": "negotiation",
    }
    rest = max(words, key=lambda part: shares[part])
    return f"{told}; most of the rest is {words[rest]} ({percent(shares[rest], 1)}).{longs}"
