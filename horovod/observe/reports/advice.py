"""Advise what to try first, in sentences that have the measurements behind them.

Used by `text` and `page`. Each piece of advice says what its subject costs in the whole recording,
and the most expensive comes first. A subject that costs no more than every job loses is left out:
see `Fault`. `tests/observe/reports/test_faults.py` measures how often advice is right. Here is the
advice on the exchange of gradients, in `rank_advice` that on what single ranks do.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from horovod.observe.reports.amounts import milliseconds as _ms
from horovod.observe.reports.amounts import percent, size_of
from horovod.observe.reports.analysis import Analysis
from horovod.observe.reports.losses import Advice, Fault, Losses
from horovod.observe.reports.rank_advice import advise_on_ranks
from horovod.observe.reports.splitting import PARTS
from horovod.observe.timeline.recording import DEVICES

ALL_COMPUTE = 0.97  # the share of compute in a step from which on Horovod cannot gain anything
LOCAL = ("SHM", "SINGLE", "")  # transports inside one host
FEWEST_OPERATIONS = 3  # in a step; fewer are worth no advice
SMALL = 1 << 20  # bytes: starting a smaller operation takes longer than moving it
SMALL_THRESHOLD = 1 << 20  # bytes: a lower HOROVOD_FUSION_THRESHOLD helps nobody
SLOW_LINK = 60e6  # bytes a second: half of what 1 Gbit/s carries

# Bytes a microsecond that every machine moves: an exchange that takes longer has other reasons.
_LOCAL_RATE, _NETWORK_RATE, _DEVICE_RATE = 1000.0, 110.0, 5000.0


def advise(analysis: Analysis) -> list[Advice]:
    """Return what could make the job faster, the most expensive first."""
    losses = analysis.losses
    if losses is None:
        return []
    run = analysis.run_time
    candidates = [*advise_on_ranks(analysis, losses), *_advise_on_exchange(analysis, losses)]
    given = [each for each in candidates if each.cost >= each.fault.worth * run]
    return sorted(given, key=lambda advice: -advice.cost)


def verdict(analysis: Analysis) -> str:
    """Return one sentence on the whole job."""
    if not analysis.steps:
        return "No steps were found: record while training runs."
    shares = {part: fmean(analysis.share(rank, part) for rank in analysis.ranks) for part in PARTS}
    step = _ms(analysis.overall("duration"))
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


# -- the exchange of gradients: operations, network, bytes -----------------------------------------


def _advise_on_exchange(analysis: Analysis, losses: Losses) -> Iterator[Advice]:
    """Yield at most one advice on the exchange of gradients, as all are about the same time."""
    small = _advise_on_small_operations(analysis, losses)
    if small is not None and small.cost >= small.fault.worth * analysis.run_time:
        yield small
        return
    network = _advise_on_network(analysis, losses)
    negotiation = analysis.overall("negotiation")
    if network is not None:
        yield network
    elif negotiation > losses.exchange / 2 and negotiation > 0:
        yield _advise_on_negotiation(analysis, losses)
    else:
        yield _advise_to_send_less(analysis, losses)


def _crosses_hosts(analysis: Analysis) -> bool:
    """Return whether gradients travel between hosts."""
    return analysis.num_hosts > 1 or bool({*analysis.transports} - {*LOCAL, *DEVICES})


def _advise_on_small_operations(analysis: Analysis, losses: Losses) -> Advice | None:
    """Return advice if many operations move few bytes, so that starting them takes the time."""
    count = analysis.operations_per_step
    if count < FEWEST_OPERATIONS or analysis.bytes_per_step / count >= SMALL:
        return None
    usual_rate = _NETWORK_RATE if _crosses_hosts(analysis) else _LOCAL_RATE
    usual_rate = _DEVICE_RATE if analysis.on_devices else usual_rate
    needed = losses.exchange / count + analysis.bytes_per_step / usual_rate
    cost = max(0.0, losses.exchange - needed)
    number = (
        f"{count:.0f} operations in each step, of {size_of(analysis.bytes_per_step / count)} on "
        f"average, take {_ms(losses.exchange)}, {percent(losses.exchange, losses.step)} of it, for "
        f"{size_of(analysis.bytes_per_step)} ({_rate(analysis, losses)}); one for all would take "
        f"about {_ms(needed)}"
    )
    threshold = analysis.fusion_threshold
    if threshold is None or threshold >= SMALL_THRESHOLD:
        action = (
            "Send more at a time: hvd.grouped_allreduce or the asynchronous forms for collectives "
            "of your own; in the optimizer fewer groups and larger buckets "
            "(HOROVOD_FUSION_THRESHOLD, or let horovodrun --autotune find it)"
        )
    elif count > analysis.collectives_per_step:
        action = (
            f"HOROVOD_FUSION_THRESHOLD is {threshold}, so that hardly anything is put together: "
            f"leave it out, or let horovodrun --autotune find it"
        )
    else:
        action = (
            f"HOROVOD_FUSION_THRESHOLD is {threshold}: leave it out, or let horovodrun --autotune "
            f"find it. Collectives of your own: hvd.grouped_allreduce, or the asynchronous forms"
        )
    cost *= len(analysis.steps)
    return Advice(Fault.SMALL_OPERATIONS, "many small operations", number, action, cost)


def _advise_on_network(analysis: Analysis, losses: Losses) -> Advice | None:
    """Return advice if links between hosts carry less than any network should."""
    hosts = analysis.num_hosts
    moving = analysis.overall("reduction") + analysis.overall("hidden")
    if not _crosses_hosts(analysis) or moving <= 0:
        return None
    sent = analysis.bytes_per_step * (2 * (hosts - 1) / hosts if hosts > 1 else 1.0)
    rate = sent / moving * 1e6
    if rate >= SLOW_LINK or analysis.bytes_per_step < SMALL / 4:
        return None
    number = (
        f"links between hosts carry {rate / 1e6:.1f} MB/s ({rate * 8 / 1e9:.2g} Gbit/s): "
        f"{size_of(analysis.bytes_per_step)} take {_ms(moving)} of each step, of which nothing "
        f"hides {_ms(losses.exchange)}"
    )
    action = (
        "See whether the job uses the right interface (horovodrun --network-interfaces) and what "
        f"iperf3 measures between the hosts. Until then: {'; '.join(_ways_to_send_less(analysis))}"
    )
    cost = losses.exchange * len(analysis.steps)
    return Advice(Fault.NETWORK, "the network is slow", number, action, cost)


def _advise_on_negotiation(analysis: Analysis, losses: Losses) -> Advice:
    """Return advice for an agreement that takes long, though collectives are not too many."""
    negotiation = min(analysis.overall("negotiation"), losses.exchange)
    number = (
        f"agreeing on {analysis.collectives_per_step:.1f} collectives takes {_ms(negotiation)} of "
        f"each step, {percent(negotiation, losses.step)}"
    )
    action = (
        "It is not the number of collectives: try a shorter HOROVOD_CYCLE_TIME, and give every "
        "process its own cores (--cpu-bind core, OMP_NUM_THREADS)"
    )
    cost = negotiation * len(analysis.steps)
    return Advice(Fault.NEGOTIATION, "agreeing takes long", number, action, cost)


def _advise_to_send_less(analysis: Analysis, losses: Losses) -> Advice:
    """Return advice for an exchange that takes long at a rate that is to be expected."""
    number = (
        f"{size_of(analysis.bytes_per_step)} a step ({_rate(analysis, losses)}): what nothing "
        f"hides takes {_ms(losses.exchange)} of each step, {percent(losses.exchange, losses.step)}"
    )
    ways = "; ".join(_ways_to_send_less(analysis))
    action, cost = ways[0].upper() + ways[1:], losses.exchange * len(analysis.steps)
    return Advice(Fault.EXCHANGE, "exchanging gradients takes long", number, action, cost)


def _ways_to_send_less(analysis: Analysis) -> list[str]:
    """Return sentences on how to send less, or at another time."""
    ways = []
    sends_far = analysis.on_devices or _crosses_hosts(analysis)
    achieved, possible = analysis.overlap_achieved or 0.0, analysis.overlap_possible
    if possible is not None and possible - achieved > 0.1:
        way = "with overlap_forward=model in the optimizer the next forward hides some"
        if not sends_far:
            way = "with HOROVOD_OVERLAP_BACKWARD=1 backward hides some, if every process has a "
            way += "core to spare"
        ways.append(
            f"{way} ({percent(achieved, 1)} of the reductions are hidden behind backward, which is "
            f"long enough for {percent(possible, 1)})"
        )
    if sends_far:
        ways.append("with compression=hvd.Compression.bf16 half the bytes are sent")
    ways.append(
        "with larger batches, or backward_passes_per_step=2 in the optimizer, the same data needs "
        "half as many exchanges"
    )
    return ways


def _rate(analysis: Analysis, losses: Losses) -> str:
    """Return how fast gradients are exchanged, as text."""
    moving = max(losses.exchange, analysis.overall("reduction") + analysis.overall("hidden"))
    rate = analysis.bytes_per_step / moving if moving else 0.0  # bytes a microsecond
    return f"{rate:.0f} MB/s" if rate >= 10 else f"{rate:.1f} MB/s"
