"""What to try first, each with the number behind it. Facts in, sentences out.

Used by `text` and `page`. Each piece of advice has what its subject costs in the whole recording,
and the most expensive comes first. Nothing is said about what costs less than every job loses: see
`faults`. How often advice is right is measured by `tests/timeline/test_faults.py`.
"""

from __future__ import annotations

from statistics import fmean

from horovod.timeline.amounts import milliseconds, percent
from horovod.timeline.analysis import Analysis
from horovod.timeline.exchange_advice import advise_on_exchange
from horovod.timeline.faults import Advice
from horovod.timeline.rank_advice import advise_on_ranks
from horovod.timeline.splitting import PARTS

ALL_COMPUTE = 0.97  # the share of a step from which on Horovod has nothing left to gain


def advise(found: Analysis) -> list[Advice]:
    """What could make the job faster, the most expensive first."""
    losses = found.losses
    if losses is None:
        return []
    run = found.run_time
    candidates = [*advise_on_ranks(found, losses), *advise_on_exchange(found, losses)]
    given = [each for each in candidates if each.cost >= each.fault.worth * run]
    return sorted(given, key=lambda advice: -advice.cost)


def verdict(found: Analysis) -> str:
    """One sentence on the whole."""
    if not found.steps:
        return "No steps were found: record while training runs."
    shares = {part: fmean(found.share(rank, part) for rank in found.ranks) for part in PARTS}
    told = (
        f"{percent(shares['compute'], 1)} of a step of {milliseconds(found.overall('duration'))} "
        f"is compute"
    )
    long = found.long.excess(of_cores=False)
    longs = f" Long steps take {percent(long, found.run_time)} of the run." if long else ""
    if shares["compute"] >= ALL_COMPUTE:
        return f"{told}: Horovod has nothing left to gain; look at the model and its data.{longs}"
    words = {
        "wait": "waiting for other ranks",
        "reduction": "reductions that nothing hides",
        "negotiation": "negotiation",
    }
    rest = max(words, key=lambda part: shares[part])
    return f"{told}; most of the rest is {words[rest]} ({percent(shares[rest], 1)}).{longs}"
