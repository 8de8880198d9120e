"""What is said about ranks that wait, and how they find out who else waits in few requests."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.common.config import Config
from horovod.common.exceptions import HorovodInternalError
from horovod.common.store import MemoryStore
from horovod.engine.channel import Channel
from horovod.engine.collective import Collective, Kind
from horovod.engine.execution.executor import Executor
from horovod.engine.request import Request
from horovod.observe.observer import Observer, Trace
from horovod.observe.statistics import stall
from horovod.observe.statistics.stall import (
    Reports,
    StallInspector,
    _reports,
    describe,
    find_behind,
    find_guilty,
    find_hanging,
    find_missing,
)
from horovod.transport.base import Group, SingleTransport

SIZE = 40


class CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def set(self, key: str, value: bytes) -> None:
        self.requests += 1
        super().set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        self.requests += 1
        return super().get(key, timeout)

    def try_get(self, key: str) -> bytes | None:
        self.requests += 1
        return super().try_get(key)

    def add(self, key: str, amount: int) -> int:
        self.requests += 1
        return super().add(key, amount)

    def keys(self, prefix: str) -> list[str]:
        self.requests += 1
        return super().keys(prefix)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


def report_of(rank: int) -> dict[str, Any]:
    return {"tensors": {"x": f"train.py:{rank}"}}


def ask(store: CountingStore, rank: int, fatal: bool) -> Reports:
    store.set(f"stall/{rank}", json.dumps(report_of(rank)).encode())
    group = Group(rank, SIZE, tuple(range(SIZE)), store, Config())
    return _reports(group, report_of(rank), fatal)


def test_the_lowest_knows_all_and_the_others_know_the_lowest(store: CountingStore):
    waiting = range(3, SIZE)
    for rank in waiting:
        ask(store, rank, False)
    assert ask(store, 3, False) == {rank: report_of(rank) for rank in waiting}
    for rank in range(4, SIZE):
        assert min(ask(store, rank, False)) == 3


def test_a_warning_takes_few_requests(store: CountingStore):
    for rank in range(1, SIZE):
        ask(store, rank, False)
    store.requests = 0
    for rank in range(1, SIZE):
        ask(store, rank, False)
    assert store.requests < 4 * SIZE


def test_in_the_end_all_know_all_from_few_requests(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stall, "_PATIENCE", 400.0)  # nobody loses it while the first collects
    for rank in range(1, SIZE):
        ask(store, rank, False)
    store.requests = 0
    expected = {rank: report_of(rank) for rank in range(1, SIZE)}
    found: list[Reports] = []
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(ask(store, rank, True)))
        for rank in range(1, SIZE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * (SIZE - 1)
    assert store.requests < 5 * SIZE


def test_if_the_first_does_not_tell_the_others_look_themselves(store: CountingStore):
    for rank in range(1, 4):
        ask(store, rank, False)
    store.add("stalled/ranks", 1)  # it died there
    assert ask(store, 2, True) == {rank: report_of(rank) for rank in range(1, 4)}


def test_a_rank_that_goes_on_meanwhile_is_left_out(store: CountingStore):
    ask(store, 5, False)
    store.delete("stall/5")
    assert ask(store, 7, False) == {7: report_of(7)}


# -- the inspection of one rank's channel ---------------------------------------------------------

WARN_AFTER = 60.0


def channel_of(rank: int, size: int, store: MemoryStore) -> Channel:
    """The queue of one rank of a job whose other ranks are not there."""
    alone = SingleTransport(Group(0, 1, (rank,), store, Config()))
    executor = Executor(alone, lambda device: alone, Observer(1, alone.group, Trace()))
    ranks = tuple(range(10, 10 + size))  # of the world: messages must not name those of the set
    group = Group(rank, size, ranks, store, Config())
    return Channel(1, group, executor, on_loss=lambda ranks: None)


def submit(channel: Channel, name: str, seconds_ago: float) -> Request:
    request = Request(channel, Collective(Kind.BARRIER, name), name, b"8 bytes.")
    request.submitted -= seconds_ago
    return channel.submit(request, background=False)


@pytest.fixture
def inspectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StallInspector]]:
    """Those that a test made; their own thread never gets to look, and the store always answers."""
    monkeypatch.setattr(stall, "_PATIENCE", 400.0)
    made: list[StallInspector] = []
    yield made
    for inspector in made:
        inspector.stop()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    handler = Handler()
    monkeypatch.setattr(stall.logger, "handlers", [*stall.logger.handlers, handler])
    return said


def inspector(made: list[StallInspector], shut_down_after: float = 0.0) -> StallInspector:
    made.append(StallInspector(list, WARN_AFTER, shut_down_after))
    return made[-1]


def test_what_is_young_is_not_spoken_of(store: CountingStore, inspectors: Any, warnings: list[str]):
    channel = channel_of(0, 2, store)
    submit(channel, "allreduce.x", WARN_AFTER / 2)
    inspector(inspectors)._inspect(channel)
    assert warnings == []
    assert store.keys("") == []


def test_the_lowest_waiting_rank_says_who_waits_where_and_who_is_missing(
    store: CountingStore, inspectors: Any, warnings: list[str]
):
    channels = [channel_of(rank, 3, store) for rank in (1, 2)]
    for channel in channels:
        submit(channel, "allreduce.x", WARN_AFTER + 1)
    watching = [inspector(inspectors) for _ in channels]
    watching[1]._inspect(channels[1])
    assert len(warnings) == 1, "so far it is the lowest"
    watching[0]._inspect(channels[0])
    text = warnings[1]
    assert "10: [allreduce.x]" in text
    for rank in (11, 12):
        assert f"\n{rank}: allreduce.x (" in text
    assert "test_stall.py:" in text, "the line that asked"
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in text, "what one can do"
    inspector(inspectors)._inspect(channels[1])
    assert len(warnings) == 2, "now it is not"


def test_it_is_said_once_in_a_while_and_not_every_time(
    store: CountingStore, inspectors: Any, warnings: list[str]
):
    channel = channel_of(0, 2, store)
    submit(channel, "allreduce.x", WARN_AFTER + 1)
    watching = inspector(inspectors)
    for _ in range(3):
        watching._inspect(channel)
    assert len(warnings) == 1


def test_what_was_posted_is_taken_back_when_the_rank_goes_on(
    store: CountingStore, inspectors: Any, warnings: list[str]
):
    channel = channel_of(0, 2, store)
    submit(channel, "allreduce.x", WARN_AFTER + 1)
    watching = inspector(inspectors)
    watching._inspect(channel)
    assert store.keys("stall/") == ["stall/0"]
    channel.close(HorovodInternalError("over"))
    watching._inspect(channel)
    assert store.keys("stall/") == []
    store.set("stall/0", b"")
    watching._inspect(channel)
    assert store.keys("stall/") == ["stall/0"], "the store is not asked again"


def test_after_the_time_to_shut_down_the_request_fails_and_says_why(
    store: CountingStore, inspectors: Any, warnings: list[str]
):
    channel = channel_of(0, 2, store)
    request = submit(channel, "allreduce.x", 2000.0)
    inspector(inspectors, shut_down_after=1000.0)._inspect(channel)
    with pytest.raises(
        HorovodInternalError, match=r"stalled for 20\d\d\.\d s(.|\n)*11: \[allreduce\.x"
    ):
        request.wait()
    assert "Shutting down after 20" in warnings[0]


class SilentStore(CountingStore):
    """A store out of reach."""

    def set(self, key: str, value: bytes) -> None:
        raise TimeoutError("no answer")


def test_without_the_store_a_rank_says_what_it_knows(inspectors: Any, warnings: list[str]):
    channel = channel_of(1, 2, SilentStore())
    request = submit(channel, "allreduce.x", 200.0)
    inspector(inspectors, shut_down_after=100.0)._inspect(channel)
    assert warnings[0].startswith("The job's store does not answer: is this host cut off?")
    assert request.done(), "it ends in time all the same"


@given(st.dictionaries(st.integers(0, 4), st.sets(st.sampled_from("pqrs"), min_size=1), min_size=1))
def test_missing_is_exactly_who_does_not_wait(waiting: dict[int, set[str]]):
    channel = channel_of(0, 5, MemoryStore())
    reports = {r: {"tensors": {n: f"train.py:{r}" for n in sorted(waiting[r])}} for r in waiting}
    text = describe(channel, reports, 61.0)
    missing, waits = text.split("Missing ranks:\n")[1].split("Waiting ranks:\n")
    names = set().union(*waiting.values())
    for rank in range(5):
        absent = names - waiting.get(rank, set())
        lines = [line for line in missing.splitlines() if line.startswith(f"{rank + 10}: ")]
        assert bool(lines) == bool(absent)
        found = set(lines[0].partition("[")[2].rstrip("]").split(", ")) if lines else set()
        assert found == absent
        assert (f"{rank + 10}: " in waits) == (rank in waiting)


def test_ranks_in_the_middle_of_an_operation_hold_up_those_that_wait_for_the_next():
    """Rank 2 hangs in "p": rank 1 has not got all of it, rank 0 has."""
    reports: Reports = {
        0: {"tensors": {"q": "train.py:2"}, "run": 8},
        1: {"tensors": {"p": "train.py:1", "q": "train.py:2"}, "run": 7},
        2: {"tensors": {"p": "train.py:1", "q": "train.py:2"}, "run": 7},
    }
    assert find_behind(reports) == {1, 2}
    assert find_missing(3, reports) == {}, "rank 0 has run what it does not wait for"
    text = describe(channel_of(0, 3, MemoryStore()), reports, 61.0)
    assert "In the middle of an operation that the others have finished: 11, 12\n" in text
    assert find_behind({0: {"tensors": {"q": ""}, "run": 8}}) == set()
    assert find_guilty(3, reports) == {1, 2}
    for rank, awaits in {0: [1, 2], 1: [2], 2: []}.items():
        reports[rank]["awaits"] = awaits
    assert find_guilty(3, reports) == {2}


def waiting_for(awaits: list[list[int] | None]) -> Reports:
    """Reports of ranks in the same operation, with the ranks that each waits for."""
    tensors = {"p": "train.py:1"}
    return {r: {"tensors": tensors, "run": 7, "awaits": peers} for r, peers in enumerate(awaits)}


def test_a_rank_that_hangs_in_an_operation_which_nobody_finishes_without_it():
    reports = waiting_for([[1, 2], [], [1]])
    assert find_hanging(reports) == find_guilty(3, reports) == {1}
    text = describe(channel_of(0, 3, MemoryStore()), reports, 61.0)
    assert "In the middle of an operation in which the others wait for them: 11\n" in text


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))))
def test_who_waits_for_somebody_is_not_blamed(job: tuple[int, list[int]]):
    """Each rank of an order waits for the one before it, and the first for nobody."""
    size, order = job
    awaits: list[list[int] | None] = [[] for _ in range(size)]
    for before, rank in itertools.pairwise(order):
        awaits[rank] = [before]
    assert find_guilty(size, waiting_for(awaits)) == {order[0]}


def test_nobody_is_blamed_where_transports_cannot_tell_who_waits_for_whom():
    assert find_guilty(2, waiting_for([None, None])) == set()
    assert find_guilty(2, waiting_for([[1], [0]])) == set(), "the network between them"
    assert find_guilty(2, waiting_for([[], []])) == set(), "nobody waits for anybody"


def test_between_two_attempts_to_agree_nobody_hangs():
    """Rank 1 waits for another operation, and by chance for nobody when it was asked."""
    reports = waiting_for([[1], []])
    reports[1]["tensors"] = {"q": "train.py:2"}
    assert find_guilty(2, reports) == {0, 1}
