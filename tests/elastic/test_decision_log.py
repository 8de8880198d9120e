"""Decisions in the store: numbered, written once, forgotten when nobody needs them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.common.generations.decisions import (
    LATEST,
    Decision,
    answer_key,
    decision_key,
    parse_answer,
)
from horovod.common.store import MemoryStore
from horovod.runner.elastic.job_state import JobState, Process
from horovod.runner.elastic.liveness import DecisionLog
from horovod.runner.elastic.policy import Proposal


class RecordingStore(MemoryStore):
    """Also knows what was written, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []
        self.watch(self.written.append)


def proposal(*workers: int, **details: object) -> Proposal:
    members = tuple(Process(w, "ab"[w % 2], joined=1, seat=w) for w in workers)
    return Proposal(members, **{"kind": "start", **details})  # type: ignore[arg-type]


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=8))
def test_every_decision_is_written_once_before_its_number(jobs: list[set[int]]):
    store, state = RecordingStore(), JobState()
    log = DecisionLog(state, store)
    for number, workers in enumerate(jobs, 1):
        decision = log.announce(proposal(*sorted(workers)))
        assert store.written[-2:] == [decision_key(number), LATEST]
        assert store.try_get(LATEST) == str(number).encode()
        found = Decision.decode(store.try_get(decision_key(number)) or b"")
        assert found == decision
        assert state.number == number
        assert set(found.slots) == {f"w{worker}" for worker in workers}
        assert sorted(slot.rank for slot in found.slots.values()) == list(range(len(workers)))
    assert set(Counter(k for k in store.written if k != LATEST).values()) == {1}


def test_the_reason_is_what_happened_since_the_last_and_who_joins():
    state = JobState()
    log = DecisionLog(state, MemoryStore())
    assert log.announce(proposal(0, 1, added=(0, 1))).reason == "the job begins"
    state.causes += ["w1 failed: exit code 1", "b gets no new workers after 1 failure"]
    decision = log.announce(proposal(0, 2, 4, kind="failure", lost=(1,), added=(2, 4)))
    assert decision.reason == (
        "w1 failed: exit code 1; b gets no new workers after 1 failure; w2 on a and w4 on a join"
    )
    assert decision.lost == ("w1",)
    assert state.causes == []
    assert log.announce(proposal(0, 2, 3, kind="added", added=(3,))).reason == "w3 on b joins"


def test_a_job_that_begins_without_a_worker_says_so():
    state = JobState()
    state.alive = {number: Process(number, "ab"[number % 2]) for number in range(3)}
    state.alive[0].ready_at = state.alive[2].ready_at = 1.0
    reason = "the job begins without w1 (b): no hvd.init() there so far"
    assert DecisionLog(state, MemoryStore()).announce(proposal(0)).reason == reason


def test_a_decision_after_which_nothing_has_happened_has_a_reason_too():
    state = JobState()
    log = DecisionLog(state, MemoryStore())
    first = proposal(0, 1)
    assert log.announce(first).reason == "the job begins"
    state.alive = {worker.number: worker for worker in first.members}
    state.placed_workers = frozenset(state.alive)
    removed = log.announce(proposal(1, kind="removed"))
    assert removed.reason == "no slot is offered any more for w0 (rank 0, a)"
    asked = log.announce(proposal(0, 1, kind="failure"))
    assert asked.reason == "workers wait for others that have finished"


def test_nobody_is_moved_who_has_just_chosen_a_device():
    store, state = RecordingStore(), JobState()
    log = DecisionLog(state, store)
    first = proposal(0, 2)
    state.alive = {worker.number: dataclasses.replace(worker) for worker in first.members}
    assert log.announce(first) is not None
    state.placed_workers = frozenset(state.alive)
    moved = Proposal((dataclasses.replace(state.alive[2], index=1),), "failure", lost=(0,))
    store.set(answer_key("met", worker="w2"), b"")  # the state does not know yet
    state.causes.append("w0 failed")
    written = len(store.written)
    assert log.announce(moved) is None
    assert (state.number, state.causes, len(store.written)) == (1, ["w0 failed"], written)
    kept = dataclasses.replace(moved, members=(state.alive[2],))
    decision = log.announce(kept)
    assert decision is not None
    assert decision.number == 2


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_old_generations_leave_the_store_when_newer_ones_have_met(formed: list[bool]):
    store, state = MemoryStore(), JobState()
    log = DecisionLog(state, store)
    for number, met in enumerate(formed, 1):
        log.announce(proposal(0))
        store.set(f"generation/{number}/0/address", b"")
        if met:
            log.forget_old()
            kept = {int(key.split("/")[1]) for key in store.keys("generation/")}
            assert kept == set(range(max(1, number - 3), number + 1))


def test_the_end_has_no_places_and_is_said_only_to_a_job_that_had_begun():
    store, state = RecordingStore(), JobState()
    log = DecisionLog(state, store)
    state.placed_workers = frozenset([0, 1])
    log.announce_the_end()
    assert store.written == []
    log.announce(proposal(0, 1))
    log.announce_the_end()
    last = Decision.decode(store.try_get(decision_key(2)) or b"")
    assert (dict(last.slots), last.lost) == ({}, ("w0", "w1"))
    assert last.breaks(Decision.decode(store.try_get(decision_key(1)) or b""))


@pytest.mark.parametrize(
    ("key", "kind", "number", "worker"),
    [
        (answer_key("ready", worker="w12"), "ready", 0, "w12"),
        (answer_key("heard", 3, "w0"), "heard", 3, "w0"),
        (answer_key("seen", 3, "w0"), "seen", 3, "w0"),
        (answer_key("broken", 10, "w1"), "broken", 10, "w1"),
        (answer_key("formed", 7), "formed", 7, ""),
        (answer_key("received", worker="w4"), "received", 0, "w4"),
        (answer_key("leaving", worker="w4"), "leaving", 0, "w4"),
        (answer_key("done", worker="w4"), "done", 0, "w4"),
    ],
)
def test_what_workers_answer_is_read_from_the_key(key: str, kind: str, number: int, worker: str):
    assert parse_answer(key) == (kind, number, worker)


@pytest.mark.parametrize("key", [LATEST, decision_key(3), "generation/3/0/over", "loss/w1", ""])
def test_other_keys_are_no_answers(key: str):
    assert parse_answer(key) is None
