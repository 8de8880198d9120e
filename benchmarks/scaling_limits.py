"""What stops scaling: the parts of a step, and of a job's life, and how they grow with its ranks.

Pure functions for benchmarks/scaling_model.py. A part's growth is how many times as long it takes
when the number of hosts doubles: 1 for what does not depend on it, about 1.1 for logarithms, 2 for
what is proportional to the number of ranks, 4 for its square.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.scaling_costs import Cost, Group, Layout, agreement, between
from benchmarks.scaling_steps import Network, Setting, cut

LINEAR = 1.5  # growth from which something goes with the ranks, not with their logarithm
QUADRATIC = 3.0
IDENTITY = 80  # bytes by which a rank says on which host it is
STALL_KEY = 12  # bytes of the key under which a rank says what it waits for
WORD = 8  # bytes of an element of the first step's agreement


@dataclass(frozen=True)
class Part:
    """One thing that takes time, by itself: parts overlap, and compute hides most of them."""

    title: str
    seconds: float
    growth: float

    @property
    def verdict(self) -> str:
        """What to call it where it stops scaling; nothing where it does not."""
        if self.growth >= QUADRATIC:
            return "GROWS WITH THE SQUARE OF RANKS"
        return "grows with ranks" if self.growth >= LINEAR else ""


def of_step(network: Network, setting: Setting, way: str) -> dict[str, float]:
    """Seconds of each part of a step's communication."""
    buckets = cut(network.pieces(), setting.bucket_bytes)
    layout, link, machine = setting.layout, setting.link, setting.machine
    asked = agreement(layout, link, machine, way != "flat") * len(buckets)
    called = machine.call * len(buckets)
    whole = sum((setting.reduction(way)(bucket) for bucket in buckets), Cost())
    return {
        "gradients: the link is full": whole.wire - asked.wire,
        "gradients: CPU for their bytes": whole.moving - asked.moving,
        "gradients: latency": whole.wait - asked.wait,
        "gradients: CPU for messages and first pieces": whole.serial - asked.serial - called,
        "agreements: latency and messages": asked.wait + asked.serial,
        "agreements: bytes of all ranks": max(asked.moving, asked.wire),
        "Python for each bucket": called,
    }


def of_job(network: Network, setting: Setting) -> dict[str, float]:
    """Seconds of what happens once in a job, or when something is wrong with it."""
    size, machine = setting.layout.size, setting.machine
    tensors = sum(layer.tensors for layer in network.layers)
    vector = WORD * (size + 2 * tensors)
    first = between(vector, Group.flat(setting.layout), setting.link, machine)
    return {
        "init: every rank says where it is and asks once": 2 * size * machine.store_request,
        "init: rank 0 asks for every rank": size * machine.store_request,
        "init: all ranks get the list of all ranks": size * size * IDENTITY * machine.store_byte,
        "first step: buckets are agreed on, a word for each rank": first.seconds(setting.crowding),
        "stall report: every rank says what it waits for": 2 * size * machine.store_request,
        "stall report: the lowest asks for every rank": size * machine.store_request,
        "stall report: all ranks hear who waits": size * size * STALL_KEY * machine.store_byte,
    }


def _compared(now: dict[str, float], half: dict[str, float]) -> list[Part]:
    found = [
        Part(title, seconds, seconds / half[title] if half[title] > 0 else 1.0)
        for title, seconds in now.items()
    ]
    return sorted(found, key=lambda part: -part.seconds)


def _halved(setting: Setting) -> Setting:
    layout = Layout(max(1, setting.layout.hosts // 2), setting.layout.per_host)
    return dataclasses.replace(setting, layout=layout)


def step_parts(network: Network, setting: Setting, way: str) -> list[Part]:
    """The parts of a step, the longest first."""
    return _compared(of_step(network, setting, way), of_step(network, _halved(setting), way))


def job_parts(network: Network, setting: Setting) -> list[Part]:
    """The parts of a job's life, the longest first."""
    return _compared(of_job(network, setting), of_job(network, _halved(setting)))
