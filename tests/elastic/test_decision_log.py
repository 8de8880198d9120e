"""Decisions in the store: numbered, written once, forgotten when nobody needs them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from horovod.common.decisions import LATEST, Decision, decision_key
from horovod.common.store import MemoryStore
from horovod.runner.elastic.decision_log import DecisionLog
from horovod.runner.elastic.policy import Proposal, WorkerView


class RecordingStore(MemoryStore):
    """Also knows what was written, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []
        self.watch(self.written.append)


def proposal(*workers: int, **details: object) -> Proposal:
    members = tuple(WorkerView(w, "ab"[w % 2], joined=1, seat=w) for w in workers)
    return Proposal(members, **{"kind": "start", **details})  # type: ignore[arg-type]


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=8))
def test_every_decision_is_written_once_before_its_number(jobs: list[set[int]]):
    store = RecordingStore()
    log = DecisionLog(store)
    for number, workers in enumerate(jobs, 1):
        decision = log.announce(proposal(*sorted(workers)))
        assert store.written[-2:] == [decision_key(number), LATEST]
        assert store.try_get(LATEST) == str(number).encode()
        found = Decision.decode(store.try_get(decision_key(number)) or b"")
        assert found == decision == log.newest
        assert set(found.slots) == {f"w{worker}" for worker in workers}
        assert sorted(slot.rank for slot in found.slots.values()) == list(range(len(workers)))
    assert set(Counter(k for k in store.written if k != LATEST).values()) == {1}


def test_the_reason_is_what_happened_since_the_last_and_who_joins():
    log = DecisionLog(MemoryStore())
    assert log.announce(proposal(0, 1, added=(0, 1))).reason == "the job begins"
    log.causes += ["w1 failed: exit code 1", "b gets no new workers after 1 failure"]
    decision = log.announce(proposal(0, 2, 4, kind="failure", lost=(1,), added=(2, 4)))
    assert decision.reason == (
        "w1 failed: exit code 1; b gets no new workers after 1 failure; w2 on a and w4 on a join"
    )
    assert decision.lost == ("w1",)
    assert log.causes == []
    assert log.announce(proposal(0, 2, 3, kind="added", added=(3,))).reason == "w3 on b joins"


def test_a_generation_is_formed_only_if_it_is_the_newest():
    log = DecisionLog(MemoryStore())
    log.announce(proposal(0, 1))
    log.announce(proposal(0))
    assert not log.take_formed(1)
    assert not log.formed
    assert log.take_formed(2)
    assert log.formed
    log.announce(proposal(0, 1))
    assert not log.formed


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_old_generations_leave_the_store_when_newer_ones_have_met(formed: list[bool]):
    store = MemoryStore()
    log = DecisionLog(store)
    for number, met in enumerate(formed, 1):
        log.announce(proposal(0))
        store.set(f"generation/{number}/0/address", b"")
        if met:
            assert log.take_formed(number)
            kept = {int(key.split("/")[1]) for key in store.keys("generation/")}
            assert kept == set(range(max(1, number - 3), number + 1))


def test_the_end_has_no_places_and_is_said_only_to_a_job_that_had_begun():
    store = RecordingStore()
    log = DecisionLog(store)
    log.announce_the_end([0])
    assert store.written == []
    log.announce(proposal(0, 1))
    log.announce_the_end([0, 1])
    last = Decision.decode(store.try_get(decision_key(2)) or b"")
    assert (dict(last.slots), last.lost) == ({}, ("w0", "w1"))
    assert last.breaks(Decision.decode(store.try_get(decision_key(1)) or b""))
