"""How ranks that wait find out who else waits, in few requests to the store."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from horovod.common.config import Config
from horovod.common.store import MemoryStore
from horovod.engine.stall import Reports, _reports
from horovod.transport.base import Group

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


def test_in_the_end_all_know_all_from_few_requests(store: CountingStore):
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
