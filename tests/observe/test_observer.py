"""What an observer makes of what the engine tells it. No processes, no engine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest
import torch

from horovod.common.config import Config
from horovod.common.store import MemoryStore
from horovod.observe.observer import Observer, Trace
from horovod.observe.statistics.process import Statistics
from horovod.observe.timeline.recorder import Timeline
from horovod.transport.base import NETWORK, SHARED_MEMORY, Group


class Kind(Enum):
    ALLREDUCE = "allreduce"


@dataclass
class Operation:
    """Fits the protocol that observers know."""

    name: str
    submitted: float = 0.0
    source: str = "train.py:1"
    tensors: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(4)])
    signature: bytes = b"8 bytes."
    kind: Kind = Kind.ALLREDUCE
    label: str = "allreduce"


def observer_of(trace: Trace, statistics: Statistics | None = None) -> Observer:
    group = Group(0, 2, (3, 5), MemoryStore(), Config())
    return Observer(7, group, trace, statistics, (SHARED_MEMORY, NETWORK))


def test_the_time_of_a_round_is_counted_once():
    statistics = Statistics()
    observer = observer_of(Trace(), statistics)
    began = time.monotonic()
    before = observer.begin_background()
    met = observer.waited(began - 2.0)
    observer.reduced(met - 3.0, 16, (SHARED_MEMORY,), True, 16)
    observer.ended([Operation("a"), Operation("b")])
    observer.end_background(before)
    observer.reduced_inline(began - 1.5, began - 0.5, 8, 4, False)
    took = time.monotonic() - began
    totals = statistics.totals()
    assert totals.wait == pytest.approx(3.0, abs=took)
    assert totals.reduce == pytest.approx(3.5, abs=2 * took)
    assert totals.hidden == pytest.approx(5.0, abs=2 * took), "the inline one was waited for"
    assert (totals.operations, totals.reduced) == (3, 24)
    assert (totals.shared_memory, totals.network) == (24, 4), "4 of 8 bytes were saved"
    observer.close()
    assert statistics.totals() == totals


def test_what_is_waited_for_is_not_hidden():
    statistics = Statistics()
    observer = observer_of(Trace(), statistics)
    before = observer.begin_background()
    counters = observer.counters
    assert counters is not None
    with observer.waiting(Operation("a")):
        counters.background_since -= 2.0  # two seconds pass
        counters.wait += 2.0
    observer.end_background(before)
    assert statistics.totals().wait == 2.0
    assert statistics.totals().hidden == pytest.approx(0.0, abs=1e-6)


def test_nobody_counts():
    observer = observer_of(Trace())
    observer.end_background(observer.begin_background())
    observer.waited(0.0)
    observer.reduced(0.0, 8)
    observer.reduced_inline(0.0, 0.0, 8, 0, False)
    observer.settled(1, [])
    observer.ended([Operation("a")])
    with observer.waiting(Operation("a")):
        pass
    assert observer.begin_on_device(torch.device("cpu"), None) is None
    observer.close()


def test_a_timeline_has_the_life_of_an_operation(tmp_path: Path):
    trace, path = Trace(), tmp_path / "t.json"
    observer = observer_of(trace)
    assert not observer.is_watching()
    assert observer.agreed([], 0) == 0.0
    trace.record(Timeline(str(path), 0))
    assert observer.is_watching()
    operation = Operation("allreduce.x", submitted=time.monotonic())
    observer.queued(operation)
    agreed = observer.agreed([operation], 12)
    with observer.activity(operation.name, "SHM_ALLREDUCE"):
        pass
    observer.ended([operation])
    ages = [observer.ages_of([operation], agreed), [-1]]
    observer.arrived([operation], 12, agreed, ages)
    trace.record(None)
    assert not observer.is_watching()
    events = [e for e in json.loads(path.read_text()) if e["ph"] != "M"]
    assert [(e["ph"], e.get("name")) for e in events] == [
        ("B", "NEGOTIATE_ALLREDUCE"),
        ("E", None),
        ("B", "ALLREDUCE"),
        ("B", "SHM_ALLREDUCE"),
        ("E", None),
        ("E", None),
        ("X", "3"),  # the first rank of the set; the other has joined
    ]
    assert events[1]["args"] == {"set": 7, "number": 12}
    assert events[5]["args"] == {"dtype": "float32", "shape": "[4]"}
