"""Contenders that take turns, and what their turns say about each other.

Used by the benchmarks whose contenders have processes of their own. A turn is one sample; what
counts are ratios of turns of the same round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeAlias

from benchmarks.processes import Group

Samples: TypeAlias = dict[str, list[float]]  # of each contender, round by round
Pairs: TypeAlias = Sequence[tuple[str, str]]  # (over, under): the ratios that matter

LEAST_ROUNDS = 8  # turns of each contender
PRECISE = 0.015  # doubt about a ratio with which we are content, over the ratio
HEAD_START = 0.005  # seconds until a turn begins: all ranks are awake by then


def ratios(samples: Samples, over: str, under: str) -> list[float]:
    """How many times as long as `under` the contender `over` took, round by round.

    What slows a machine down for seconds hits both sides of such a ratio.
    """
    return [top / bottom for top, bottom in zip(samples[over], samples[under], strict=True)]


def interval(values: list[float]) -> tuple[float, float]:
    """What has their true median in it, 19 times out of 20.

    It reaches between two of the values in order, so nothing is assumed of how they scatter.
    """
    ordered, reach = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - reach), math.ceil(len(values) / 2 + reach)
    if low < 0 or high >= len(values):
        return -math.inf, math.inf
    return ordered[low], ordered[high]


def doubt(values: list[float]) -> float:
    """Half of that interval."""
    low, high = interval(values)
    return (high - low) / 2


def is_precise(samples: Samples, pairs: Pairs, precise: float = PRECISE) -> bool:
    """Whether the ratios of these turns are known to within `precise` of themselves."""
    return all(doubt(found := ratios(samples, *pair)) <= precise * median(found) for pair in pairs)


def race(
    contenders: Mapping[str, Callable[[], float]],
    pairs: Pairs,
    seconds: float,
    *,
    precise: float = PRECISE,
    deadline: float = math.inf,
) -> Samples:
    """Call the contenders in turn until the ratios are known.

    Args:
        contenders: What takes a turn of each and returns its sample.
        pairs: The ratios that have to be known.
        seconds: Most time for it, once every contender has had its LEAST_ROUNDS turns.
        precise: Doubt about a ratio with which we are content, over the ratio.
        deadline: Moment (`time.monotonic`) before which the race ends with the rounds that it has,
            be they fewer; there is one in any case.
    """
    samples: Samples = {name: [] for name in contenders}
    order = list(contenders)
    began, enough = time.monotonic(), False
    while not enough:
        round_began = time.monotonic()
        for name in order:
            samples[name].append(contenders[name]())
        order.append(order.pop(0))  # nobody is always the first
        now = time.monotonic()
        late = now - began > seconds
        rounds = len(samples[order[0]])
        enough = rounds >= LEAST_ROUNDS and (late or is_precise(samples, pairs, precise))
        enough = enough or now + (now - round_began) > deadline
    return samples


def timed_turn(group: Group) -> float:
    """A turn that begins at the same moment on all ranks: what the slowest answers."""
    return max(group.ask(time.monotonic() + HEAD_START))
