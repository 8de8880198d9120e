"""Advice on what ranks do by themselves: who is late, why, and in which steps. Used by `advice`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

from horovod.timeline.amounts import milliseconds as _ms
from horovod.timeline.amounts import ordinal, ranks_named
from horovod.timeline.analysis import Analysis
from horovod.timeline.faults import Advice, Fault
from horovod.timeline.long_steps import Where
from horovod.timeline.losses import Losses
from horovod.timeline.splitting import StepSplit

FEWEST_LONG_STEPS = 2  # one alone may be anything: a note tells of it
FEWEST_FOR_A_PERIOD = 3
FORWARD_SHARE = 0.5  # of backward: what forward takes of it in most models
SLOW_INPUT = 4.0  # times as long as backward is what no forward and update should take


def advise_on_ranks(found: Analysis, losses: Losses) -> Iterator[Advice]:
    """Advice that has nothing to do with the exchange of gradients."""
    yield from _long_steps(found)
    yield from _slow_ranks(found, losses)
    yield from _cores(found, losses)
    yield from _turns(found, losses)
    yield from _input(found, losses)


# -- long steps ------------------------------------------------------------------------------


def _long_steps(found: Analysis) -> Iterator[Advice]:
    """Some steps are much longer than the others."""
    long = found.long
    steps = long.counted
    if len(steps) < FEWEST_LONG_STEPS:
        return
    cost = sum(each.excess for each in steps)
    period = long.period
    when = f"every {ordinal(period)} step" if period else "at irregular distances"
    if len(steps) < FEWEST_FOR_A_PERIOD:
        when = f"number {' and '.join(str(each.step.number) for each in steps)}"
    usual, longer = found.step_time, median(each.step.duration for each in steps)
    number = (
        f"{len(steps)} of {len(found.all_steps)} steps, {when}, take {_ms(longer)} (median) "
        f"instead of {_ms(usual)}. {_who_was_last(found)}"
    )
    yield Advice(Fault.LONG_STEPS, "long steps", number, _what_is_long(found), cost)


def _who_was_last(found: Analysis) -> str:
    where, last = found.long.where, found.long.last
    if where is Where.EXCHANGE:
        return "The exchange of gradients takes long in them"
    if where is Where.ALL_RANKS:
        return "All ranks compute longer in them"
    if last is None:
        return "Now one rank is the last in them, now another"
    rank, times = last
    return f"Rank {rank}{_on_host(found, rank)} is the last in {times} of them"


def _what_is_long(found: Analysis) -> str:
    where, last = found.long.where, found.long.last
    if where is Where.EXCHANGE:
        return "Look for what else uses the network, or the memory of the hosts, at these times"
    if where is Where.ALL_RANKS:
        return (
            "Look for what all ranks do in these steps only: evaluation, a new epoch's loader "
            "(persistent_workers=True keeps it), garbage collection. Do it less often, or not "
            "at all"
        )
    if last is None:
        return (
            "Look for what ranks do now and then, each at another time: garbage collection, a "
            "much longer batch, a file that is read. All others wait meanwhile"
        )
    return (
        f"Look for what rank {last[0]} does alone in these steps: a checkpoint, a log, an "
        f"evaluation. All others wait meanwhile: do it in a thread or less often, or share it "
        f"between the ranks"
    )


# -- slow ranks ------------------------------------------------------------------------------


def _slow_ranks(found: Analysis, losses: Losses) -> Iterator[Advice]:
    """Ranks are slow in all steps."""
    slow = losses.slow
    if slow is None:
        return
    named = ranks_named(slow.ranks)
    are = "is" if len(slow.ranks) == 1 else "are"
    whose = "it is" if len(slow.ranks) == 1 else "one of them is"
    number = (
        f"{whose} the last in {slow.times_last} of {slow.num_steps} steps. "
        f"{named[0].upper()}{named[1:]}{_on_hosts(found, slow.ranks)} "
        f"compute{'s' if len(slow.ranks) == 1 else ''} {_ms(slow.excess)} (median) longer than the "
        f"others"
    )
    action = _where_slow(found, slow.ranks)
    yield Advice(
        Fault.SLOW_RANKS, f"{named} {are} slow", number, action, slow.cost * len(found.steps)
    )


def _where_slow(found: Analysis, ranks: Sequence[int]) -> str:
    """Whether it is before the first gradient that ranks lose time, or in backward."""
    before, backward = (_compared(found, ranks, part) for part in ("before_backward", "backward"))
    if before is None or backward is None:
        return (
            "Look at data loading there (more or faster loader workers), at the cores and their "
            "clock: all ranks take as long as the slowest"
        )
    excess = max(before.excess, backward.excess)
    blocked = None if found.on_devices else _compared(found, ranks, "blocked")
    rests = ""
    if blocked is not None and blocked.excess > excess / 2:
        rests = f", and for {_ms(blocked.excess)} of that it does not run: it waits for something"
    if before.excess >= backward.excess:
        return (
            f"It takes {_ms(before.own)} until the first gradient, on the others "
            f"{_ms(before.others)}{rests}. Look at data loading there first (loader workers, slow "
            f"disk, longer samples), then at forward"
        )
    return (
        f"Backward takes {_ms(backward.own)}, on the others {_ms(backward.others)}{rests}. Look at "
        f"the cores or the GPU there (other programs, clock, temperature, OMP_NUM_THREADS) and at "
        f"the sizes of batches"
    )


class _Compared(NamedTuple):
    """How long something takes on some ranks and on the others."""

    own: float
    others: float

    @property
    def excess(self) -> float:
        return self.own - self.others


def _compared(found: Analysis, ranks: Sequence[int], part: str) -> _Compared | None:
    own = _middle(found, ranks, part)
    others = _middle(found, [rank for rank in found.ranks if rank not in ranks], part)
    return None if own is None or others is None else _Compared(own, others)


def _middle(found: Analysis, ranks: Sequence[int], part: str) -> float | None:
    values = [found.known(rank, part) for rank in ranks if rank in found.ranks]
    known = [value for value in values if value is not None]
    return median(known) if known else None


# -- cores, and ranks that take turns --------------------------------------------------------


def _cores(found: Analysis, losses: Losses) -> Iterator[Advice]:
    """Ranks are ready to run and have no core."""
    cost = losses.cores * len(found.steps) + found.long.excess(of_cores=True)
    if cost <= 0:
        return
    starved = {rank: _mean(found.all_steps, rank, "starved") for rank in found.ranks}
    host, ranks, cores = _most_crowded(found)
    most = max(starved, key=lambda rank: starved[rank])
    number = (
        f"ranks are ready to run and have no core for {_ms(median(starved.values()))} of a step "
        f"(mean), rank {most}{_on_host(found, most)} for {_ms(starved[most])}"
    )
    if ranks > cores > 0:
        on = f" of {host}" if len(set(found.hosts.values())) > 1 else ""
        number += f"; {ranks} ranks share {cores} core{'' if cores == 1 else 's'}{on}"
        yield Advice(
            Fault.CORES,
            "cores are oversubscribed",
            number,
            "Start at most one rank for each core (-np, or slots of --hosts)",
            cost,
        )
        return
    if cores:
        number += f"; {ranks} rank{'' if ranks == 1 else 's'} may use {cores} cores"
    action = (
        "Something else runs on their cores: other programs, loader workers, more threads than "
        "cores (OMP_NUM_THREADS), or a limit of the container. Look with top while training runs; "
        "horovodrun --cpu-bind core gives every rank cores of its own"
    )
    yield Advice(Fault.CORES, "cores are busy with something else", number, action, cost)


def _most_crowded(found: Analysis) -> tuple[str, int, int]:
    """The host with the most ranks for its cores: its name, its ranks and its cores."""
    places: dict[str, list[int]] = {}
    for rank in found.cores:
        places.setdefault(found.hosts[rank], []).append(rank)
    crowds = [
        (host, len(ranks), len(frozenset().union(*(found.cores[rank] for rank in ranks))))
        for host, ranks in places.items()
    ]
    return max(crowds, key=lambda each: each[1] / each[2], default=("", 0, 0))


def _turns(found: Analysis, losses: Losses) -> Iterator[Advice]:
    """Ranks are late in turn: their steps differ in length."""
    if losses.turns <= 0:
        return
    most = max(found.slowest_counts.values(), default=0)
    number = (
        f"in each step some rank computes {_ms(losses.turns)} (mean) longer than the rank in the "
        f"middle, and no rank is the last in more than {most} of {len(found.steps)} steps"
    )
    action = (
        "Make the batches of a step equally long (sort samples by length, drop the last batch), "
        "and give every rank more loader workers"
    )
    yield Advice(
        Fault.TURNS, "ranks are late in turn", number, action, losses.turns * len(found.steps)
    )


# -- input -----------------------------------------------------------------------------------


def _input(found: Analysis, losses: Losses) -> Iterator[Advice]:
    """All ranks take long before their first gradient."""
    ranks = [rank for rank in found.ranks if losses.slow is None or rank not in losses.slow.ranks]
    before = _middle(found, ranks, "before_backward")
    backward = _middle(found, ranks, "backward")
    blocked = 0.0 if found.on_devices else _middle(found, ranks, "blocked") or 0.0
    if before is None or backward is None:
        return
    action = (
        "Look at data loading on all ranks: more loader workers, prefetching, a faster disk, less "
        "work for each sample"
    )
    told = f"it takes {_ms(before)} until the first gradient of a step, and {_ms(backward)} from "
    told += "there to the last"
    beyond = before - FORWARD_SHARE * backward  # of input, if forward takes what it usually does
    # Where cores are short, a thread also waits for the other threads of its rank, which have none.
    has_cores = losses.cores < Fault.CORES.worth * losses.step
    starved = _middle(found, ranks, "starved") or 0.0
    if not has_cores and blocked < 2 * starved:
        blocked = 0.0
    if beyond > FORWARD_SHARE * blocked > 0:
        number = (
            f"{told}; for {_ms(blocked)} of a step ranks neither run nor wait for other ranks, but "
            f"for something else"
        )
        mean = median(_mean(found.steps, rank, "blocked") for rank in ranks)
        yield Advice(
            Fault.INPUT, "all ranks wait for input", number, action, mean * len(found.steps)
        )
    elif has_cores and before > SLOW_INPUT * backward:
        number = f"{told}; forward usually takes half as long as backward"
        yield Advice(
            Fault.INPUT,
            "input takes long on all ranks",
            number,
            f"{action}. If most of the model is frozen, forward itself may take as long",
            (before - backward) * len(found.steps),
        )


def _mean(steps: Sequence[StepSplit], rank: int, part: str) -> float:
    """The mean of what not all steps tell; 0 for those."""
    return fmean(step.ranks[rank].part(part) or 0.0 for step in steps if rank in step.ranks)


def _on_host(found: Analysis, rank: int) -> str:
    several = len(set(found.hosts.values())) > 1
    return f" (host {found.hosts[rank]})" if several and rank in found.hosts else ""


def _on_hosts(found: Analysis, ranks: Sequence[int]) -> str:
    """Of which host they are, if they are all of one of several."""
    hosts = {found.hosts.get(rank) for rank in ranks}
    return _on_host(found, ranks[0]) if len(hosts) == 1 else ""
