"""What to try first, each with the number behind it. Facts in, sentences out.

Used by `text` and `page`. A piece of advice names how much of a step it could save at most; the
largest comes first. Nothing is advised for what takes less than `WORTH` of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

from horovod.timeline.amounts import milliseconds as _ms
from horovod.timeline.amounts import size_of
from horovod.timeline.analysis import PARTS, Analysis

WORTH = 0.03  # the least share of a step that is worth a try
OFTEN = 0.5  # the share of steps in which the same rank must be last
SMALL = 1 << 20  # bytes: collectives below cost more to start than to move
_LOCAL = ("SHM", "")  # transports inside one host


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    subject: str
    number: str  # what was measured
    action: str
    saves: float  # microseconds of a step, at most


def advise(found: Analysis) -> list[Advice]:
    """What could make steps shorter, the most promising first."""
    if not found.steps:
        return []
    step = found.overall("duration")
    rules = (_slow_rank, _taking_turns, _negotiation, _overlap, _compression, _batch_size)
    given = [advice for rule in rules for advice in rule(found, step) if advice.saves > 0]
    return sorted(given, key=lambda advice: -advice.saves)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _slow_rank(found: Analysis, step: float) -> Iterator[Advice]:
    """One rank is late again and again."""
    counts = found.slowest_counts
    if not counts:
        return
    rank, times = counts.most_common(1)[0]
    if times < OFTEN * len(found.steps):
        return
    late = median(s.lateness for s in found.steps if s.slowest == rank)
    others = [other for other in found.ranks if other != rank]
    waiting = max((found.mean(other, "wait") for other in others), default=0.0)
    excess = _excess(found, rank, others, "compute")
    # All wait for its last gradients, even while something else is being reduced.
    saves = max(waiting, min(late, excess[0]) if excess is not None else 0.0)
    if saves < WORTH * step:
        return
    number = (
        f"rank {rank}{_on_host(found, rank)} is the last in {times} of {len(found.steps)} steps, "
        f"by {_ms(late)} (median); others wait up to {_percent(waiting, step)} of a step for it"
    )
    yield Advice(f"rank {rank} is slow", number, _where_slow(found, rank, others), saves)


def _where_slow(found: Analysis, rank: int, others: list[int]) -> str:
    """Whether it is before its first gradient that the rank loses time, or in backward."""
    before, backward = (
        _excess(found, rank, others, "before_backward"),
        _excess(found, rank, others, "backward"),
    )
    if before is None or backward is None:
        return (
            "Look at its data loading (more or faster loader workers), its cores and its clock: "
            "all ranks take as long as the slowest"
        )
    mine, theirs = found.known(rank, "before_backward") or 0.0, before[1]
    if before[0] >= backward[0]:
        return (
            f"It takes {_ms(mine)} until its first gradient, the others {_ms(theirs)}: look at "
            f"its data loading first (loader workers, slow disk, longer samples), then at forward"
        )
    mine, theirs = found.known(rank, "backward") or 0.0, backward[1]
    return (
        f"Its backward takes {_ms(mine)}, that of the others {_ms(theirs)}: look at its cores or "
        f"GPU (other programs, clock, temperature, OMP_NUM_THREADS) and the sizes of its batches"
    )


def _excess(found: Analysis, rank: int, others: list[int], part: str) -> tuple[float, float] | None:
    """How much longer this takes on the rank than on the others, and how long on those."""
    mine = found.known(rank, part)
    known = [value for value in (found.known(r, part) for r in others) if value is not None]
    if mine is None or not known:
        return None
    return mine - median(known), median(known)


def _taking_turns(found: Analysis, step: float) -> Iterator[Advice]:
    """Ranks are late in turn: their steps differ in length."""
    wait, counts = found.overall("wait"), found.slowest_counts
    if wait < WORTH * step or not counts:
        return
    times = max(counts.values())
    if times >= OFTEN * len(found.steps):
        return
    number = (
        f"ranks wait {_percent(wait, step)} of a step for each other, and no rank is the last in "
        f"more than {times} of {len(found.steps)} steps"
    )
    action = (
        "Make the batches of a step equally long (sort samples by length, drop the last batch), "
        "give every rank its own cores (--cpu-bind core) and more loader workers"
    )
    yield Advice("ranks are late in turn", number, action, wait)


def _negotiation(found: Analysis, step: float) -> Iterator[Advice]:
    """Agreeing takes time: there are many collectives, or a long cycle."""
    negotiation, count = found.overall("negotiation"), found.collectives_per_step
    if negotiation < WORTH * step or count <= 0:
        return
    size = size_of(found.bytes_per_step / count)
    number = (
        f"agreeing on {count:.1f} collectives in each step, of {size} on average, takes "
        f"{_ms(negotiation)}, {_percent(negotiation, step)} of it"
    )
    subject = "bucket size"
    if count > 4 and found.bytes_per_step / count < SMALL:
        action = (
            "Send more at a time: larger buckets (HOROVOD_FUSION_THRESHOLD, or let horovodrun "
            "--autotune find them), hvd.grouped_allreduce or the asynchronous forms for "
            "collectives of your own"
        )
    else:
        subject = "negotiation"
        action = (
            "It is not the number of collectives: give every process its own cores (--cpu-bind "
            "core, OMP_NUM_THREADS), and try a shorter HOROVOD_CYCLE_TIME"
        )
    yield Advice(subject, number, action, negotiation)


def _overlap(found: Analysis, step: float) -> Iterator[Advice]:
    """Reductions that backward could hide."""
    reduction, possible = found.overall("reduction"), found.overlap_possible
    achieved = found.overlap_achieved or 0.0
    if possible is None or reduction < WORTH * step:
        return
    gain = (possible - achieved) * (reduction + found.overall("hidden"))
    if gain < WORTH * step:
        return
    number = (
        f"{_percent(achieved, 1)} of the reductions are hidden behind backward, which is long "
        f"enough for {_percent(possible, 1)}: {_ms(gain)} of each step"
    )
    if set(found.transports) <= {*_LOCAL}:
        action = (
            "HOROVOD_OVERLAP_BACKWARD=1 reduces beside backward also inside one host: faster only "
            "if every process has a core to spare, so measure it"
        )
    else:
        action = (
            "Give the optimizer the model (overlap_forward=model): the next forward hides what "
            "backward does not. Other bucket sizes: horovodrun --autotune, HOROVOD_FUSION_THRESHOLD"
        )
        if achieved == 0:
            action = f"HOROVOD_OVERLAP_BACKWARD=1 reduces beside backward. {action}"
    yield Advice("overlap", number, action, gain / 2)  # nobody hides the last bucket, or for free


def _compression(found: Analysis, step: float) -> Iterator[Advice]:
    """Reductions that would take half as long with half the bytes."""
    reduction = found.overall("reduction")
    crosses = len(set(found.hosts.values())) > 1 or not set(found.transports) <= {*_LOCAL}
    if reduction < 2 * WORTH * step or not crosses:
        return
    total = reduction + found.overall("hidden")
    rate = found.bytes_per_step / total if total else 0.0  # bytes a microsecond
    number = (
        f"{size_of(found.bytes_per_step)} a step at {rate:.0f} MB/s: reductions that nothing "
        f"hides take {_ms(reduction)}, {_percent(reduction, step)} of a step"
    )
    action = "Use compression=hvd.Compression.bf16: half the bytes between hosts"
    yield Advice("compression", number, action, reduction / 2)


def _batch_size(found: Analysis, step: float) -> Iterator[Advice]:
    """A larger batch has the same communication for more work."""
    exchange = found.overall("reduction") + found.overall("negotiation")
    if exchange < 4 * WORTH * step:
        return
    compute = found.overall("compute")
    share = exchange / step
    after = exchange / (exchange + 2 * compute + found.overall("wait"))
    number = (
        f"exchanging gradients takes {_ms(exchange)} of each step, {100 * share:.0f} %; with twice "
        f"the work between two exchanges it would be about {100 * after:.0f} %"
    )
    action = (
        "Larger batches, or backward_passes_per_step=2 in the optimizer: half as many exchanges "
        "for the same data"
    )
    yield Advice("batch size", number, action, exchange / 2)


def verdict(found: Analysis) -> str:
    """One sentence on the whole."""
    if not found.steps:
        return "No steps were found: record while training runs."
    shares = {part: fmean(found.share(rank, part) for rank in found.ranks) for part in PARTS}
    largest = max(shares, key=lambda part: shares[part])
    told = (
        f"{100 * shares['compute']:.0f} % of a step of {_ms(found.overall('duration'))} is compute"
    )
    if largest == "compute" and shares["compute"] >= 1 - WORTH:
        return f"{told}: Horovod has nothing left to gain; look at the model and its data."
    words = {
        "wait": "waiting for other ranks",
        "reduction": "reductions that nothing hides",
        "negotiation": "negotiation",
    }
    rest = max(words, key=lambda part: shares[part])
    return f"{told}; most of the rest is {words[rest]} ({100 * shares[rest]:.0f} %)."


def _on_host(found: Analysis, rank: int) -> str:
    several = len(set(found.hosts.values())) > 1
    return f" (host {found.hosts[rank]})" if several and rank in found.hosts else ""
