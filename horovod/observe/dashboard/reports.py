"""Read the reports of ranks from the job's store, and check them before anything uses them.

Workers write JSON under ``stats/<generation>/<rank>`` (see docs/stats.md). The store is
authenticated, but a training script may log anything: types are checked, numbers are finite, texts
and lists are cut. A wrong part of a report is dropped, and never breaks the page.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from horovod.common.store import MemoryStore

KEY_PREFIX = "stats/"
_KEY = re.compile(r"stats/([0-9]{1,9})/([0-9]{1,9})")
STATES = ("starting", "training", "waiting", "ended")

_MOST_BYTES = 1 << 20
_MOST_QUEUED = 10_000
_MOST_STEPS = 50
_MOST_VALUES = 200
_MOST_METRICS = 32
_MOST_TENSORS = 8
_MOST_RANK = 1 << 20
_FOR_EVER = 1e15  # larger than any number of steps or seconds
_ROUNDING = 1e-3  # a difference of two clocks may be negative by this many seconds
_LONGEST = 300  # characters of a text
_MOST_CORES = 1 << 14

COUNTERS = {
    "steps": "Optimizer steps.",
    "step_seconds": "Seconds in steps.",
    "backward_seconds": "Seconds in backward.",
    "wait_seconds": "Seconds waiting for other ranks.",
    "reduce_seconds": "Seconds reducing.",
    "hidden_seconds": "Seconds reducing behind backward.",
    "bytes_reduced": "Bytes of tensors reduced.",
    "buckets": "Buckets of gradients reduced.",
    "operations": "Collective operations.",
    "negotiation_misses": "Operations that ranks had to agree on anew.",
    "cpu_seconds": "Processor seconds of the rank's process.",
}
GAUGES = {
    "queue_length": "Operations that wait to run.",
    "memory_bytes": "Resident memory.",
    "gpu_memory_bytes": "GPU memory in use.",
    "gpu_memory_total_bytes": "Memory of the rank's GPU.",
    "gpu_use": "Share of the last moment in which the rank's GPU computed.",
    "last_step_seconds": "Seconds of the newest step.",
    "steps_per_second": "Steps per second, lately.",
}
TRANSPORTS = {
    "bytes_shared_memory": "shared_memory",
    "bytes_network": "network",
    "bytes_device": "device",
}
NUMBERS = (*COUNTERS, *GAUGES, *TRANSPORTS)
"""The values of ``hvd.stats()`` that are kept."""


class ReportedStep(NamedTuple):
    """The times of one step on one rank, in seconds."""

    number: int
    end: float  # since the epoch
    total: float
    backward: float
    wait: float
    reduce: float
    hidden: float  # the part of `reduce` that ran during backward

    @property
    def exposed(self) -> float:
        """The part of the reduction that the step waited for."""
        return min(max(self.reduce - self.hidden, 0.0), max(self.total - self.wait, 0.0))

    @property
    def compute(self) -> float:
        return max(self.total - self.wait - self.exposed, 0.0)


@dataclass(frozen=True)
class Waiting:
    """An operation in which a rank waits, and the ranks for which it waits."""

    since: float
    tensors: tuple[str, ...]
    missing: tuple[int, ...]
    source: str


@dataclass(frozen=True)
class Report:
    """One report of one rank."""

    rank: int
    generation: int
    size: int
    local_rank: int
    host: str
    pid: int
    time: float
    state: str
    cores: frozenset[int] = frozenset()  # the cores that it may use; empty if unknown
    steps_before: int = 0  # steps that its process made before this generation
    stats: dict[str, float] = field(default_factory=dict)
    steps: tuple[ReportedStep, ...] = ()
    waiting: Waiting | None = None
    metrics: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)


class ReportQueue:
    """The reports as they come into the job's store, until somebody takes them."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._entries: deque[tuple[float, str, bytes]] = deque(maxlen=_MOST_QUEUED)
        store.watch(self._on_key)

    def take(self) -> deque[tuple[float, Report]]:
        """Return the usable reports since the last call, each with the time at which it came."""
        taken: deque[tuple[float, Report]] = deque()
        for _ in range(len(self._entries)):
            at, key, content = self._entries.popleft()
            found = parse_key(key)
            if found is not None and (report := parse_report(*found, content)) is not None:
                taken.append((at, report))
        return taken

    def _on_key(self, key: str) -> None:
        """Queue a report. The store's threads call this, so that no report is missed."""
        if key.startswith(KEY_PREFIX):
            value = self._store.try_get(key)
            if value is not None:
                self._entries.append((time.time(), key, value))


def parse_key(key: str) -> tuple[int, int] | None:
    """Return generation and rank of a report's key; None for any other key."""
    match = _KEY.fullmatch(key)
    if match is None or int(match[2]) >= _MOST_RANK:
        return None
    return int(match[1]), int(match[2])


def parse_report(generation: int, rank: int, content: bytes) -> Report | None:
    """Return the report that a rank wrote; None if it cannot be used at all.

    Args:
        generation: The generation in the key; what the report claims does not count.
        rank: The rank in the key.
        content: The value in the store.
    """
    if len(content) > _MOST_BYTES:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("version") != 1:
        return None
    state = found.get("state")
    stats = found.get("stats")
    return Report(
        rank=rank,
        generation=generation,
        size=_whole(found.get("size")),
        local_rank=_whole(found.get("local_rank")),
        host=text(found.get("host")),
        pid=_whole(found.get("pid")),
        time=_number(found.get("time")) or 0.0,
        state=state if isinstance(state, str) and state in STATES else "training",
        cores=_cores(found.get("cores")),
        steps_before=_whole(found.get("steps_before")),
        stats=_numbers(stats) if isinstance(stats, dict) else {},
        steps=tuple(filter(None, map(_step, _items(found.get("steps"), _MOST_STEPS)))),
        waiting=_waiting(found.get("waiting")),
        metrics=_metrics(found.get("metrics")),
    )


def text(value: Any, longest: int = _LONGEST) -> str:
    """Return a text, cut and without control characters; empty for other values."""
    if not isinstance(value, str):
        return ""
    cut = value[:longest]
    return "".join(c if c.isprintable() else " " for c in cut)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < 1 << 31 else 0


def _numbers(stats: dict[Any, Any]) -> dict[str, float]:
    found = {name: _number(stats.get(name)) for name in NUMBERS}
    return {name: value for name, value in found.items() if value is not None and value >= 0}


def _cores(value: Any) -> frozenset[int]:
    cores = _items(value, _MOST_CORES)
    return frozenset(core for core in cores if type(core) is int and 0 <= core < _MOST_CORES)


def _items(value: Any, most: int) -> list[Any]:
    return value[-most:] if isinstance(value, list) else []


def _step(entry: Any) -> ReportedStep | None:
    if not isinstance(entry, list) or len(entry) < 7:
        return None
    row = entry[:7]
    for index, value in enumerate(row):  # there are many steps, so this loop has to be fast
        if not (type(value) is float or type(value) is int) or not -_ROUNDING < value < _FOR_EVER:
            return None
        if value < 0:
            row[index] = 0.0
    return ReportedStep._make(row)


def _waiting(value: Any) -> Waiting | None:
    if not isinstance(value, dict):
        return None
    since = _number(value.get("since")) or 0.0
    missing = {_whole(rank) for rank in _items(value.get("missing_ranks"), 4096)}
    tensors = tuple(filter(None, map(text, _items(value.get("tensors"), _MOST_TENSORS))))
    return Waiting(since, tensors, tuple(sorted(missing)), text(value.get("source")))


def _metrics(value: Any) -> dict[str, tuple[tuple[float, float], ...]]:
    if not isinstance(value, dict):
        return {}
    found = {}
    for name, entries in list(value.items())[:_MOST_METRICS]:
        pairs = [each for each in _items(entries, _MOST_VALUES) if isinstance(each, list)]
        points = [(_number(pair[0]), _number(pair[1])) for pair in pairs if len(pair) == 2]
        known = tuple((at, value) for at, value in points if at is not None and value is not None)
        if known and text(name, 80):
            found[text(name, 80)] = known
    return found
