"""Compute which way to train a link allows: ``horovodrun --plan``.

`launch` prints `describe`, and benchmarks/scaling_model.py uses the same model. Only what no
program can avoid is computed: bytes on the link and its latency. So the result is the best that can
be expected, and what other programs send over the link makes it worse.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

GOOD = 0.95  # share of the speed without communication that a recommended way reaches, if any does
FORWARD = 1 / 3  # share of a step, in which nothing is sent: backward takes twice as long
FEW_HOSTS = 8  # up to which everybody exchanges parts with everybody at once
FIRST_BURST = 10 * 1460  # bytes that TCP sends at first, after a pause
SLACK = 1.5  # how much longer than computed a fragment may travel before a step waits for it


@dataclass(frozen=True)
class Link:
    """The link of each host to all others: seconds one way, and bytes per second each way."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class PlannedJob:
    """A training: parameters of the model, seconds of a step by itself, hosts, and their link."""

    parameters: float
    step: float
    hosts: int
    link: Link

    def exchange(self, bits: int, part: float = 1.0) -> float:
        """Return the seconds of one allreduce of a part of the model, with `bits` an element."""
        if self.hosts == 1:
            return 0.0
        rounds = 1 if self.hosts <= FEW_HOSTS else math.ceil(math.log2(self.hosts))
        return 2 * rounds * self.link.latency + part * self.sent(bits) / self.link.bandwidth

    def agreement(self) -> float:
        """Return the seconds that the hosts need to agree to begin an exchange."""
        return math.ceil(math.log2(self.hosts)) * self.link.latency

    def slow_start(self, bits: int, part: float) -> float:
        """Return the seconds that a connection which was idle needs to get to its full speed.

        TCP then begins with a few segments, and sends twice as many after each round trip, until
        the link is full or all is sent.
        """
        round_trip = 2 * self.link.latency
        share = part * self.parameters * bits / 8 / self.hosts
        burst = min(share, round_trip * self.link.bandwidth)
        return round_trip * max(0, math.ceil(math.log2(max(burst, 1) / FIRST_BURST)))

    def sent(self, bits: int) -> float:
        """Return the bytes that leave each host in an allreduce of the whole model."""
        return 2 * (self.hosts - 1) / self.hosts * self.parameters * bits / 8


@dataclass(frozen=True)
class Way:
    """One way to train: what is sent, how often, and whether it travels beside training."""

    title: str
    bits: int = 32  # bits of an element on the link
    local_steps: int = 0  # 0: gradients, in every step
    fragments: int = 1  # more than one: each travels beside training

    def delay(self, job: PlannedJob) -> int:
        """Return the steps that a fragment travels beside training.

        They are as many as agreeing, TCP's slow start and the link need and half as many again,
        and at least two. A fragment is there before the next one is sent: with more delay they
        would share the link.
        """
        if self.fragments == 1:
            return 0
        return math.ceil(min(max(self._needed_delay(job), 2), self._longest_delay))

    def fitted(self, job: PlannedJob) -> Way:
        """Return this way, with half the fragments if those could be late.

        Fragments follow each other less closely then, and so have more time to travel.
        """
        if self.fragments > 2 and self._needed_delay(job) > self._longest_delay:
            return replace(self, fragments=self.fragments // 2)
        return self

    def _needed_delay(self, job: PlannedJob) -> float:
        """Return the steps that a fragment needs to travel, with some slack."""
        part = 1 / self.fragments
        seconds = job.agreement() + job.slow_start(self.bits, part) + job.exchange(self.bits, part)
        return SLACK * seconds / job.step

    @property
    def _longest_delay(self) -> int:
        return self.local_steps // self.fragments - 1

    def arguments(self, job: PlannedJob) -> str:
        """Return the arguments of DistributedOptimizer, as they are written in a program."""
        found = []
        if self.local_steps:
            found.append(f"local_steps={self.local_steps}")
        if self.fragments > 1:
            found += [f"fragments={self.fragments}", f"delay={self.delay(job)}"]
        if self.local_steps:
            found.append("outer=hvd.OuterSGD()")
        if self.bits < 32:
            found.append(f"compression=hvd.Compression.{COMPRESSIONS[self.bits]}")
        return ", ".join(found)

    def sent(self, job: PlannedJob) -> float:
        """Return the bytes that leave each host, for each step."""
        return job.sent(self.bits) / max(1, self.local_steps)

    def wait(self, job: PlannedJob) -> float:
        """Return the seconds that the longest step waits for the network."""
        took = job.exchange(self.bits, 1 / self.fragments)
        if not self.local_steps:
            return max(0.0, took - (1 - FORWARD) * job.step)  # beside backward
        return max(0.0, took - self.delay(job) * job.step)

    def speed(self, job: PlannedJob) -> float:
        """Return the speed of training, relative to that without communication."""
        waits = self.fragments / self.local_steps if self.local_steps else 1.0
        return job.step / (job.step + waits * self.wait(job))


COMPRESSIONS = {16: "bf16", 8: "fp8"}

# In the order of how much they change training: the first that is fast enough is the best.
WAYS = (
    Way("every step"),
    Way("every step, bf16", 16),
    Way("every step, fp8", 8),
    Way("local steps", 32, 50),
    Way("local steps, fp8", 8, 50),
    Way("streaming", 32, 100, 4),
    Way("streaming, fp8", 8, 100, 4),
)


def planned_job(options: argparse.Namespace) -> PlannedJob:
    """Return the job of ``horovodrun --plan``: without -H every process is on a host of its own."""
    hosts = len(options.hosts) if options.hosts else options.num_proc
    return PlannedJob(options.model_size, options.step_time, hosts, Link(*options.link))


def ways(job: PlannedJob) -> list[Way]:
    """Return all ways, each with as many fragments as the link has time for."""
    return [way.fitted(job) for way in WAYS]


def recommend(job: PlannedJob) -> Way:
    """Return the way that changes training least and is fast enough, or else the fastest."""
    found = ways(job)
    for way in found:
        if way.speed(job) >= GOOD:
            return way
    return max(found, key=lambda way: way.speed(job))


def describe(job: PlannedJob) -> str:
    """Return the text that ``horovodrun --plan`` prints."""
    way, link = recommend(job), job.link
    given = (
        f"{job.parameters / 1e6:g} million parameters, {_seconds(job.step)} per step, {job.hosts} "
        f"hosts, {link.bandwidth * 8 / 1e9:g} Gbit/s, {_seconds(link.latency)} one way"
    )
    rows = [["", "sent per step and host", "speed", "longest wait"]]
    for each in ways(job):
        speed = f"{100 * each.speed(job):.0f} %"
        rows.append([each.title, _bytes(each.sent(job)), speed, _seconds(each.wait(job))])
    if way is WAYS[0]:
        advice = "Recommended: nothing of this. Average gradients in every step, as usual."
    else:
        advice = f"Recommended: hvd.DistributedOptimizer(..., {way.arguments(job)})"
    if way.speed(job) < GOOD:
        advice += f"\nNothing here reaches {100 * GOOD:.0f} % on this link: this is the fastest."
    if way.local_steps:
        advice += (
            "\nBegin with a quarter of ordinary steps (warmup_steps=...), and compare the loss "
            f"with\nthat of training every step before you rely on it. Ranks differ for up to "
            f"{way.local_steps} steps."
        )
    notes = (
        "Speed is relative to training without communication, computed from the link alone: it is\n"
        "the best that can be expected. See docs/slow_links.md."
    )
    return "\n".join([given, "", *_aligned(rows), "", advice, "", notes])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        title, *cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("   ".join([title.strip().ljust(widths[0]), *cells]).rstrip())
    return lines


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _seconds(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"
