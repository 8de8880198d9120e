"""Advise on the exchange of gradients: operations, network, bytes. `advice` uses this."""

from __future__ import annotations

from collections.abc import Iterator

from horovod.observe.reports.amounts import milliseconds as _ms
from horovod.observe.reports.amounts import percent, size_of
from horovod.observe.reports.analysis import Analysis
from horovod.observe.reports.faults import Advice, Fault
from horovod.observe.reports.losses import Losses
from horovod.observe.timeline.recording import DEVICES

LOCAL = ("SHM", "SINGLE", "")  # transports inside one host
FEWEST_OPERATIONS = 3  # in a step; fewer are worth no advice
SMALL = 1 << 20  # bytes: starting a smaller operation takes longer than moving it
SMALL_THRESHOLD = 1 << 20  # bytes: a lower HOROVOD_FUSION_THRESHOLD helps nobody
SLOW_LINK = 60e6  # bytes a second: half of what 1 Gbit/s carries

# Bytes a microsecond that every machine moves: an exchange that takes longer has other reasons.
_LOCAL_RATE, _NETWORK_RATE, _DEVICE_RATE = 1000.0, 110.0, 5000.0


def advise_on_exchange(analysis: Analysis, losses: Losses) -> Iterator[Advice]:
    """Yield at most one advice on the exchange of gradients, as all are about the same time."""
    small = _advise_on_small_operations(analysis, losses)
    if small is not None and small.cost >= small.fault.worth * analysis.run_time:
        yield small
        return
    network = _advise_on_network(analysis, losses)
    if network is not None:
        yield network
        return
    negotiation = analysis.overall("negotiation")
    if negotiation > losses.exchange / 2 and negotiation > 0:
        yield _advise_on_negotiation(analysis, losses)
        return
    yield _advise_to_send_less(analysis, losses)


def crosses_hosts(analysis: Analysis) -> bool:
    """Return whether gradients travel between hosts."""
    return len(set(analysis.hosts.values())) > 1 or bool(
        {*analysis.transports} - {*LOCAL, *DEVICES}
    )


def _advise_on_small_operations(analysis: Analysis, losses: Losses) -> Advice | None:
    """Return advice if many operations move few bytes, so that starting them takes the time."""
    count = analysis.operations_per_step
    if count < FEWEST_OPERATIONS or analysis.bytes_per_step / count >= SMALL:
        return None
    needed = losses.exchange / count + analysis.bytes_per_step / _usual_rate(analysis)
    cost = max(0.0, losses.exchange - needed)
    number = (
        f"{count:.0f} operations in each step, of {size_of(analysis.bytes_per_step / count)} on "
        f"average, take {_ms(losses.exchange)}, {percent(losses.exchange, losses.step)} of it, for "
        f"{size_of(analysis.bytes_per_step)} ({_rate(analysis, losses)}); one for all would take "
        f"about {_ms(needed)}"
    )
    threshold = analysis.fusion_threshold
    if (
        threshold is not None
        and threshold < SMALL_THRESHOLD
        and count > analysis.collectives_per_step
    ):
        action = (
            f"HOROVOD_FUSION_THRESHOLD is {threshold}, so that hardly anything is put together: "
            f"leave it out, or let horovodrun --autotune find it"
        )
    elif threshold is not None and threshold < SMALL_THRESHOLD:
        action = (
            f"HOROVOD_FUSION_THRESHOLD is {threshold}: leave it out, or let horovodrun --autotune "
            f"find it. Collectives of your own: hvd.grouped_allreduce, or the asynchronous forms"
        )
    else:
        action = (
            "Send more at a time: hvd.grouped_allreduce or the asynchronous forms for collectives "
            "of your own; in the optimizer fewer groups and larger buckets "
            "(HOROVOD_FUSION_THRESHOLD, or let horovodrun --autotune find it)"
        )
    return Advice(
        Fault.SMALL_OPERATIONS,
        "many small operations",
        number,
        action,
        cost * len(analysis.steps),
    )


def _advise_on_network(analysis: Analysis, losses: Losses) -> Advice | None:
    """Return advice if links between hosts carry less than any network should."""
    hosts = len(set(analysis.hosts.values()))
    moving = analysis.overall("reduction") + analysis.overall("hidden")
    if not crosses_hosts(analysis) or moving <= 0:
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
    return Advice(
        Fault.NETWORK, "the network is slow", number, action, losses.exchange * len(analysis.steps)
    )


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
    return Advice(
        Fault.EXCHANGE,
        "exchanging gradients takes long",
        number,
        ways[0].upper() + ways[1:],
        losses.exchange * len(analysis.steps),
    )


def _ways_to_send_less(analysis: Analysis) -> list[str]:
    """Return sentences on how to send less, or at another time."""
    ways = []
    achieved, possible = analysis.overlap_achieved or 0.0, analysis.overlap_possible
    if possible is not None and possible - achieved > 0.1:
        hidden = (
            f"{percent(achieved, 1)} of the reductions are hidden behind backward, which is long "
            f"enough for {percent(possible, 1)}"
        )
        if analysis.on_devices or crosses_hosts(analysis):
            way = "with overlap_forward=model in the optimizer the next forward hides some"
        else:
            way = (
                "with HOROVOD_OVERLAP_BACKWARD=1 backward hides some, if every process has a core "
                "to spare"
            )
        ways.append(f"{way} ({hidden})")
    if analysis.on_devices or crosses_hosts(analysis):
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


def _usual_rate(analysis: Analysis) -> float:
    """Return the bytes a microsecond that the transport moves on every machine."""
    if analysis.on_devices:
        return _DEVICE_RATE
    return _NETWORK_RATE if crosses_hosts(analysis) else _LOCAL_RATE
