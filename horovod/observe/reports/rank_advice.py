"""Advise on what single ranks do: which are late, why, and in which steps. `advice` uses this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from horovod.observe.reports.amounts import count_of, ordinal, ranks_named
from horovod.observe.reports.amounts import milliseconds as _ms
from horovod.observe.reports.analysis import Analysis
from horovod.observe.reports.losses import Advice, Fault, Losses, Where
from horovod.observe.reports.slow_ranks import (
    COMPUTE,
    WHERE_TO_LOOK,
    cause_of,
    count_ranks_and_cores,
)
from horovod.observe.reports.splitting import StepSplit

FEWEST_LONG_STEPS = 2  # a single one may have any reason, and gets a note only
FEWEST_FOR_A_PERIOD = 3
FORWARD_SHARE = 0.5  # forward takes this share of backward's time in most models
SLOW_INPUT = 4.0  # times backward: no forward and update should take that long
# Backward is what lies between the first gradient and the last. With a few layers that is only a
# part of it: the first gradient comes late, and the update weighs more than the arithmetic.
FEWEST_GRADIENTS = 16


def advise_on_ranks(analysis: Analysis, losses: Losses) -> Iterator[Advice]:
    """Yield the advice that has nothing to do with the exchange of gradients."""
    yield from _advise_on_long_steps(analysis)
    yield from _advise_on_slow_ranks(analysis, losses)
    yield from _advise_on_cores(analysis, losses)
    yield from _advise_on_turns(analysis, losses)
    yield from _advise_on_input(analysis, losses)


# -- long steps ------------------------------------------------------------------------------


def _advise_on_long_steps(analysis: Analysis) -> Iterator[Advice]:
    """Yield advice if some steps are much longer than the others."""
    long = analysis.long_steps
    steps = long.counted
    if len(steps) < FEWEST_LONG_STEPS:
        return
    period = long.period
    when = f"every {ordinal(period)} step" if period else "at irregular distances"
    if len(steps) < FEWEST_FOR_A_PERIOD:
        when = f"number {' and '.join(str(each.step.number) for each in steps)}"
    usual, longer = analysis.step_time, median(each.step.duration for each in steps)
    told, action = _advise_where_long(analysis)
    number = (
        f"{len(steps)} of {len(analysis.all_steps)} steps, {when}, take {_ms(longer)} (median) "
        f"instead of {_ms(usual)}. {told}"
    )
    yield Advice(Fault.LONG_STEPS, "long steps", number, action, long.excess(of_cores=False))


def _advise_where_long(analysis: Analysis) -> tuple[str, str]:
    """Return a sentence on who was last in the long steps, and what to look for in them."""
    where, last = analysis.long_steps.where, analysis.long_steps.last
    if where is Where.EXCHANGE:
        return (
            "The exchange of gradients takes long in them",
            "Look for what else uses the network, or the memory of the hosts, at these times",
        )
    if where is Where.ALL_RANKS:
        return (
            "All ranks compute longer in them",
            "Look for what all ranks do in these steps only: evaluation, a new epoch's loader "
            "(persistent_workers=True keeps it), garbage collection. Do it less often, or not "
            "at all",
        )
    if last is None:
        return (
            "Now one rank is the last in them, now another",
            "Look for what ranks do now and then, each at another time: garbage collection, a "
            "much longer batch, a file that is read. All others wait meanwhile",
        )
    rank, times = last
    return (
        f"Rank {rank}{_on_hosts(analysis, [rank])} is the last in {times} of them",
        f"Look for what rank {rank} does alone in these steps: a checkpoint, a log, an "
        f"evaluation. All others wait meanwhile: do it in a thread or less often, or share it "
        f"between the ranks",
    )


# -- slow ranks ------------------------------------------------------------------------------


def _advise_on_slow_ranks(analysis: Analysis, losses: Losses) -> Iterator[Advice]:
    """Yield advice if ranks are slow in all steps."""
    slow = losses.slow_ranks
    if slow is None:
        return
    named = ranks_named(slow.ranks)
    are = "is" if len(slow.ranks) == 1 else "are"
    whose = "it is" if len(slow.ranks) == 1 else "one of them is"
    number = (
        f"{whose} the last in {slow.times_last} of {slow.num_steps} steps. "
        f"{named[0].upper()}{named[1:]}{_on_hosts(analysis, slow.ranks)} "
        f"compute{'s' if len(slow.ranks) == 1 else ''} {_ms(slow.excess)} (median) longer than the "
        f"others"
    )
    action, cost = _advise_where_slow(analysis, slow.ranks), slow.cost * len(analysis.steps)
    yield Advice(Fault.SLOW_RANKS, f"{named} {are} slow", number, action, cost)


def _advise_where_slow(analysis: Analysis, ranks: Sequence[int]) -> str:
    """Return where to look: slow ranks lose time before the first gradient, or in backward."""
    others = [rank for rank in analysis.ranks if rank not in ranks]

    def medians(part: str) -> tuple[float, float] | None:
        """Return the median of a part on these ranks and on the others; None if it is unknown."""
        own, usual = (_median_over(analysis, each, part) for each in (ranks, others))
        return None if own is None or usual is None else (own, usual)

    before, backward = medians("before_backward"), medians("backward")
    if before is None or backward is None:
        return (
            "Look at data loading there (more or faster loader workers), at the cores and their "
            "clock: all ranks take as long as the slowest"
        )
    more_before, more_backward = before[0] - before[1], backward[0] - backward[1]
    own, usual = (None if analysis.on_devices else medians("blocked")) or (0.0, 0.0)
    rests = ""
    if own - usual > max(more_before, more_backward, 0.0) / 2:
        rests = f", and for {_ms(own - usual)} of that it does not run: it waits for something"
    cause = cause_of(more_before + more_backward, more_backward)
    told = f"Backward takes {_ms(backward[0])}, on the others {_ms(backward[1])}"
    if cause == COMPUTE:
        told = f"It takes {_ms(before[0])} until the first gradient, on the others "
        told += _ms(before[1])
    return f"{told}{rests}. {WHERE_TO_LOOK[cause]}"


def _median_over(analysis: Analysis, ranks: Sequence[int], part: str) -> float | None:
    """Return the median over some ranks of a part of a step; None if it is not known."""
    values = [analysis.median_of(rank, part) for rank in ranks if rank in analysis.ranks]
    known = [value for value in values if value is not None]
    return median(known) if known else None


# -- cores, and ranks that take turns --------------------------------------------------------


def _advise_on_cores(analysis: Analysis, losses: Losses) -> Iterator[Advice]:
    """Yield advice if ranks are ready to run and have no core."""
    cost = losses.cores * len(analysis.steps) + analysis.long_steps.excess(of_cores=True)
    if cost <= 0:
        return
    starved = {rank: _mean(analysis.all_steps, rank, "starved") for rank in analysis.ranks}
    loads = count_ranks_and_cores(analysis.hosts, analysis.cores)
    host, ranks, cores = max(loads, key=lambda each: each.ranks / each.cores, default=("", 0, 0))
    most = max(starved, key=lambda rank: starved[rank])
    number = (
        f"ranks are ready to run and have no core for {_ms(median(starved.values()))} of a step "
        f"(mean), rank {most}{_on_hosts(analysis, [most])} for {_ms(starved[most])}"
    )
    if ranks > cores > 0:
        on = f" of {host}" if analysis.num_hosts > 1 else ""
        number += f"; {ranks} ranks share {count_of(cores, 'core')}{on}"
        action = "Start at most one rank for each core (-np, or slots of --hosts)"
        yield Advice(Fault.CORES, "cores are oversubscribed", number, action, cost)
        return
    if cores:
        number += f"; {count_of(ranks, 'rank')} may use {cores} cores"
    action = (
        "Something else runs on their cores: other programs, loader workers, more threads than "
        "cores (OMP_NUM_THREADS), or a limit of the container. Look with top while training runs; "
        "horovodrun --cpu-bind core gives every rank cores of its own"
    )
    yield Advice(Fault.CORES, "cores are busy with something else", number, action, cost)


def _advise_on_turns(analysis: Analysis, losses: Losses) -> Iterator[Advice]:
    """Yield advice if ranks are late in turn, because their steps differ in length."""
    if losses.turns <= 0:
        return
    most = max(analysis.slowest_counts.values(), default=0)
    number = (
        f"in each step some rank computes {_ms(losses.turns)} (mean) longer than the rank in the "
        f"middle, and no rank is the last in more than {most} of {len(analysis.steps)} steps"
    )
    action = (
        "Make the batches of a step equally long (sort samples by length, drop the last batch), "
        "and give every rank more loader workers"
    )
    cost = losses.turns * len(analysis.steps)
    yield Advice(Fault.TURNS, "ranks are late in turn", number, action, cost)


# -- input -----------------------------------------------------------------------------------


def _advise_on_input(analysis: Analysis, losses: Losses) -> Iterator[Advice]:
    """Yield advice if all ranks take long before their first gradient."""
    slow = () if losses.slow_ranks is None else losses.slow_ranks.ranks
    ranks = [rank for rank in analysis.ranks if rank not in slow]
    before = _median_over(analysis, ranks, "before_backward")
    backward = _median_over(analysis, ranks, "backward")
    blocked = 0.0 if analysis.on_devices else _median_over(analysis, ranks, "blocked") or 0.0
    if before is None or backward is None:
        return
    action = (
        "Look at data loading on all ranks: more loader workers, prefetching, a faster disk, less "
        "work for each sample"
    )
    told = f"it takes {_ms(before)} until the first gradient of a step, and {_ms(backward)} from "
    told += "there to the last"
    beyond = before - FORWARD_SHARE * backward  # input, if forward takes its usual share
    gradients = sum(max(1, len(row.tensors)) for row in analysis.awaited_collectives)
    # If there are too few cores, a thread also waits for other threads of its rank without a core.
    has_cores = losses.cores < Fault.CORES.worth * losses.step
    starved = _median_over(analysis, ranks, "starved") or 0.0
    if not has_cores and blocked < 2 * starved:
        blocked = 0.0
    if beyond > FORWARD_SHARE * blocked > 0:
        told += f"; for {_ms(blocked)} of a step ranks neither run nor wait for other ranks, but "
        told += "for something else"
        mean = median(_mean(analysis.steps, rank, "blocked") for rank in ranks)
        cost = mean * len(analysis.steps)
        yield Advice(Fault.INPUT, "all ranks wait for input", told, action, cost)
    elif has_cores and before > SLOW_INPUT * backward and gradients >= FEWEST_GRADIENTS:
        told += "; forward usually takes half as long as backward"
        action += ". If most of the model is frozen, forward itself may take as long"
        cost = (before - backward) * len(analysis.steps)
        yield Advice(Fault.INPUT, "input takes long on all ranks", told, action, cost)


def _mean(steps: Sequence[StepSplit], rank: int, part: str) -> float:
    """Return the mean of a part that some steps do not have, which count as 0."""
    return fmean(step.ranks[rank].part(part) or 0.0 for step in steps if rank in step.ranks)


def _on_hosts(analysis: Analysis, ranks: Sequence[int]) -> str:
    """Return the host of some ranks in brackets, if all are on one of several hosts."""
    hosts = {analysis.hosts.get(rank) for rank in ranks}
    if analysis.num_hosts == 1 or len(hosts) > 1 or None in hosts:
        return ""
    return f" (host {hosts.pop()})"
