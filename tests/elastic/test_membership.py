"""Decisions and generations, with threads for workers and a store in memory."""

from __future__ import annotations

import dataclasses
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from horovod.common.environments import Elastic, detect
from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations import membership
from horovod.common.generations.decisions import (
    DRIVER_LOST,
    LATEST,
    Decision,
    answer_key,
    decision_key,
)
from horovod.common.generations.membership import WORKER_ID, Membership, is_elastic
from horovod.common.joining.launcher_store import SECRET_KEY, STORE_ADDRESS, STORE_PORT
from horovod.common.store import MemoryStore
from horovod.common.topology import Slot
from horovod.common.wire import encode_key


def decision(number: int, workers: str, kind: str = "added", lost: str = "") -> Decision:
    size = len(workers.split())
    slots = {
        worker: Slot("here", rank, size, rank, size, 0, 1)
        for rank, worker in enumerate(workers.split())
    }
    return Decision(number, slots, f"reason {number}", kind, tuple(lost.split()))


def publish(store: MemoryStore, *decisions: Decision) -> None:
    for each in decisions:
        store.set(decision_key(each.number), each.encode())
        store.set(LATEST, str(each.number).encode())


def meet(member: Membership) -> None:
    """What the engine does, in short: all workers of the generation show up, then it stands."""
    generation = member.generation
    assert generation is not None
    generation.set(f"here/{generation.topology.rank}", b"")
    for rank in range(generation.topology.size):
        generation.get(f"here/{rank}", 30)
    generation.mark_formed()


def test_a_decision_survives_the_wire():
    original = decision(3, "w0 w2", "failure", "w1")
    assert Decision.decode(original.encode()) == original
    assert original.slots["w2"].topology.rank == 1
    with pytest.raises(ValueError, match="unknown kind 'perhaps'"):
        decision(1, "w0", "perhaps")


@pytest.mark.parametrize(
    ("newer", "breaks"),
    [
        (decision(2, "w0", "failure", "w1"), True),
        (decision(2, "w0", "failure"), True),
        (decision(2, "w0 w1", "failure", "w7"), False),  # it died before it joined
        (decision(2, "w0 w1 w2", "added"), False),
        (decision(2, "w0", "removed"), False),
        (decision(2, "w0", "removed", "w1"), True),
        (decision(2, "w0 w2", "mixed", "w1"), True),
        (decision(2, "w0 w2", "mixed"), False),
    ],
)
def test_which_decisions_break_a_world(newer: Decision, breaks: bool):
    assert newer.breaks(decision(1, "w0 w1", "start")) is breaks


def test_workers_meet_in_the_newest_decision():
    store = MemoryStore()
    publish(store, decision(1, "w0 w1 w2", "start"), decision(2, "w1 w0"))
    members = [Membership(store, worker) for worker in ("w0", "w1")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda m: m.form(lambda: meet(m), 30), members))
    assert [m.generation.topology.rank for m in members if m.generation] == [1, 0]
    assert store.keys("elastic/seen/") == [answer_key("seen", 2, "w0"), answer_key("seen", 2, "w1")]


def test_a_meeting_is_given_up_for_a_newer_decision():
    store = MemoryStore()
    publish(store, decision(1, "w0 w1", "start"))
    member = Membership(store, "w0")
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(member.form, lambda: meet(member), 30)
        store.get("generation/1/0/here/0", 30)  # it waits for w1, who never comes
        publish(store, decision(2, "w0", "removed"))
        forming.result(timeout=30)
    assert member.generation is not None
    assert member.generation.decision.number == 2


def test_the_last_of_many_decisions_counts():
    store = MemoryStore()
    publish(store, decision(1, "w0 w1", "start"))
    member = Membership(store, "w0")
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(member.form, lambda: meet(member), 30)
        store.get("generation/1/0/here/0", 30)
        publish(store, *(decision(n, "w0 w1", "failure", "w1") for n in range(2, 20)))
        publish(store, decision(20, "w0"))
        forming.result(timeout=30)
    assert member.generation is not None
    assert member.generation.decision.number == 20


def test_a_standing_world_ends_only_when_it_breaks():
    store, told = MemoryStore(), threading.Event()
    publish(store, decision(1, "w0", "start"))
    member = Membership(store, "w0")
    reasons: list[str] = []
    member.on_break = lambda reason, generation: (reasons.append(reason), told.set())
    member.form(lambda: meet(member), 30)
    generation = member.generation
    assert generation is not None
    publish(store, decision(2, "w0 w1", "added"))
    while member.newest.number < 2:
        threading.Event().wait(0.001)
    with pytest.raises(TimeoutError, match="the generation of decision 1"):
        generation.get("nothing", 0.3)
    assert not reasons
    publish(store, decision(3, "w1", "failure", "w0"))
    assert told.wait(30)
    assert reasons == ["decision 3: reason 3"]
    with pytest.raises(HorovodInternalError, match="reason 3"):
        generation.get("nothing", 30)


def test_what_is_in_the_store_is_taken_even_if_the_meeting_is_over():
    """A rank that has all it needs goes on: others may have met with it already."""
    store = MemoryStore()
    publish(store, decision(1, "w0 w1", "start"))
    member = Membership(store, "w0")

    def start() -> None:
        generation = member.generation
        assert generation is not None
        if generation.decision.number == 1:
            generation.set("there", b"yes")
            publish(store, decision(2, "w0", "failure", "w1"))
            with pytest.raises(HorovodInternalError):
                generation.get("missing", 30)
            assert generation.get("there", 0) == b"yes"
            assert generation.try_get("there") == b"yes"
            generation.mark_formed()

    member.form(start, 30)
    assert member.generation is not None
    assert member.generation.decision.number == 2


@pytest.mark.parametrize(("newer", "number"), [("w0 w1 w2", 1), ("w1 w2", 2), ("w0 w2 w1", 2)])
def test_a_worker_that_was_moved_gives_up_its_first_generation(newer: str, number: int):
    """Otherwise it would choose the device of its old local rank, which somebody else gets."""
    store = MemoryStore()
    publish(store, decision(1, "w0 w1", "start"))
    member = Membership(store, "w1")
    tries = []

    def start() -> None:
        assert member.generation is not None
        tries.append(member.generation.decision.number)
        if tries == [1]:
            publish(store, decision(2, newer, "added"))
        member.generation.mark_formed()

    member.form(start, 30)
    assert tries[-1] == number
    assert store.try_get(answer_key("met", worker="w1")) == b""
    assert member.holds_state


def test_a_worker_says_once_that_it_has_the_state_and_again_if_that_failed():
    class Store(MemoryStore):
        tries = 0

        def set(self, key: str, value: bytes) -> None:
            self.tries += 1
            if self.tries == 1:
                raise ConnectionError("nobody answers")
            super().set(key, value)

    store = Store()
    member = Membership(store, "w1")
    member.confirm_state()
    assert store.try_get(answer_key("received", worker="w1")) is None
    member.confirm_state()
    member.confirm_state()
    assert (store.try_get(answer_key("received", worker="w1")), store.tries) == (b"", 2)


def test_a_world_that_broke_without_a_decision_is_tried_again():
    """Also by a worker that comes late: it finds the attempt that the others are in."""
    store = MemoryStore()
    publish(store, decision(1, "w0 w1", "start"))
    early, late = Membership(store, "w0"), Membership(store, "w1")
    failed = []

    def start_early() -> None:
        if not failed:
            failed.append(1)
            raise HorovodInternalError("a connection broke")
        meet(early)

    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(early.form, start_early, 30)
        store.get("generation/1/1/here/0", 30)
        late.form(lambda: meet(late), 30)
        forming.result(timeout=30)


def left_out(store: MemoryStore) -> Membership:
    """Return a worker that has the state, and no place in the newest decision, its second."""
    publish(store, decision(1, "w1", "start"))
    member = Membership(store, "w1")
    member.form(lambda: meet(member), 30)
    assert member.generation is not None
    member.generation.close()
    publish(store, decision(2, "w0", "removed"))
    return member


def test_a_worker_without_a_place_ends():
    store = MemoryStore()
    member = left_out(store)
    store.set(answer_key("formed", 2), b"")
    with pytest.raises(SystemExit) as end:
        member.form(lambda: None, 30)
    assert end.value.code == 0
    assert store.try_get(answer_key("leaving", worker="w1")) == b"", (
        "it is no member, whatever happens now"
    )


def test_a_worker_without_a_place_comes_back_if_the_others_are_lost_before_they_meet():
    store = MemoryStore()
    publish(store, decision(1, "w1 w0", "start"))
    member = Membership(store, "w1")
    member.form(lambda: member.generation and member.generation.mark_formed(), 30)
    publish(store, decision(2, "w0", "removed"))
    assert member.generation is not None
    member.generation.close()
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(member.form, lambda: meet(member), 30)
        store.get(answer_key("heard", 2, "w1"), 30)
        publish(store, decision(3, "w1", "failure", "w0"))
        forming.result(timeout=30)
    assert member.generation is not None
    assert member.generation.decision.number == 3


def test_a_worker_without_a_place_whose_connection_breaks_as_it_says_so_says_it_again():
    class Store(MemoryStore):
        tries = 0

        def set(self, key: str, value: bytes) -> None:
            self.tries += key == answer_key("leaving", worker="w1")
            if key == answer_key("leaving", worker="w1") and self.tries == 1:
                raise ConnectionResetError("by the peer")
            super().set(key, value)

    store = Store()
    member = left_out(store)
    store.set(answer_key("formed", 2), b"")
    with pytest.raises(SystemExit) as end:
        member.form(lambda: None, 30)
    assert (end.value.code, store.try_get(answer_key("leaving", worker="w1"))) == (0, b"")


def test_a_worker_without_a_place_that_is_told_to_leave_does_not_wait_for_the_others():
    store = MemoryStore()
    member = left_out(store)
    member.leaving = True
    with pytest.raises(SystemExit):
        member.form(lambda: None, 30)


def test_a_new_worker_waits_for_its_place():
    store = MemoryStore()
    member = Membership(store, "w1")
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(member.form, lambda: meet(member), 30)
        store.get(answer_key("ready", worker="w1"), 30)
        publish(store, decision(1, "w0", "start"))
        publish(store, decision(2, "w0"))
        publish(store, decision(3, "w1"))
        forming.result(timeout=30)
    assert store.try_get(answer_key("seen", 2, "w1")) is None
    assert store.get(answer_key("seen", 3, "w1"), 1) == b"0"
    assert store.try_get(answer_key("formed", 3)) is not None


def test_too_few_workers_wait_for_the_next_decision():
    store = MemoryStore()
    publish(store, dataclasses.replace(decision(1, "w0"), min_np=2))
    member = Membership(store, "w0")
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(member.form, lambda: None, 30)
        store.get(answer_key("ready", worker="w0"), 30)
        publish(store, dataclasses.replace(decision(2, "w0 w1"), min_np=2))
        forming.result(timeout=30)
    assert store.try_get(answer_key("seen", 1, "w0")) is None
    assert store.try_get(answer_key("seen", 2, "w0")) is not None


def test_a_worker_that_is_told_to_leave_does_not_wait_for_others():
    store = MemoryStore()
    publish(store, decision(1, "w0 w1", "start"))
    member = Membership(store, "w0")
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(member.form, lambda: meet(member), 30)
        store.get("generation/1/0/here/0", 30)
        member.leaving = True
        with pytest.raises(SystemExit):
            forming.result(timeout=30)
    assert store.try_get(answer_key("leaving", worker="w0")) is not None


@pytest.mark.parametrize("too_few", [False, True])
def test_a_worker_that_has_the_state_does_not_leave_before_it_has_met_others(too_few: bool):
    """It may be the last that has it."""
    store = MemoryStore()
    publish(store, decision(1, "w0", "start"))
    member = Membership(store, "w0")
    member.form(lambda: meet(member), 30)
    assert member.generation is not None
    member.generation.close()
    member.leaving = True
    publish(store, dataclasses.replace(decision(2, "w0"), min_np=2 if too_few else 1))
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(member.form, lambda: meet(member), 30)
        if too_few:
            publish(store, dataclasses.replace(decision(3, "w0 w1"), min_np=2))
            store.get("generation/3/0/here/0", 30)
            store.set("generation/3/0/here/1", b"")
        forming.result(timeout=30)
    assert member.generation is not None
    assert store.try_get(answer_key("leaving", worker="w0")) is None


def test_workers_that_never_meet_are_given_up():
    store = MemoryStore()
    publish(store, decision(1, "w0 w1", "start"))
    member = Membership(store, "w0")
    with pytest.raises(HorovodInternalError, match=r"did not meet within 0\.1 s"):
        member.form(lambda: member.generation and member.generation.get("never", 0.2), 0.1)
    assert member.unrecoverable


class _LostStore(MemoryStore):
    lost = False

    def get(self, key: str, timeout: float) -> bytes:
        if self.lost:
            raise ConnectionError("nobody answers")
        return super().get(key, min(timeout, 0.05))

    def try_get(self, key: str) -> bytes | None:
        if self.lost:
            raise ConnectionError("nobody answers")
        return super().try_get(key)


def test_a_lost_driver_breaks_the_world(monkeypatch: pytest.MonkeyPatch):
    ended, told = threading.Event(), threading.Event()
    monkeypatch.setattr(membership, "_LAST_WORDS", 0.01)
    monkeypatch.setattr(membership.os, "_exit", lambda code: ended.set())
    store = _LostStore()
    publish(store, decision(1, "w0", "start"))
    member = Membership(store, "w0")
    member.on_break = lambda reason, generation: told.set()
    member.form(lambda: meet(member), 30)
    store.lost = True
    assert told.wait(30)
    assert "is gone or out of reach" in (member.unrecoverable or "")
    assert ended.wait(30)
    with pytest.raises(SystemExit) as end:
        member.form(lambda: meet(member), 30)
    assert end.value.code == DRIVER_LOST


class _BreakingStore(MemoryStore):
    """A store whose connection breaks in every wait for the next decision, but not in others."""

    breaks = 0

    def get(self, key: str, timeout: float) -> bytes:
        if key == decision_key(2) and self.breaks < 3 and self.try_get(key) is None:
            self.breaks += 1
            raise ConnectionError("reset by peer")
        return super().get(key, timeout)


def test_connections_that_break_again_and_again_are_opened_again():
    heard = threading.Event()
    store = _BreakingStore()
    store.watch(lambda key: heard.set() if key == answer_key("heard", 2, "w0") else None)
    publish(store, decision(1, "w0", "start"))
    member = Membership(store, "w0")
    member.form(lambda: meet(member), 30)
    while store.breaks < 3:
        assert member.unrecoverable is None
    publish(store, decision(2, "w0", "added"))
    assert heard.wait(30)
    assert member.unrecoverable is None


def test_a_driver_that_was_never_there_is_not_an_error_of_the_program(
    caplog: pytest.LogCaptureFixture,
):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    environ = {
        "HOROVOD_ELASTIC": "1",
        WORKER_ID: "w3",
        STORE_ADDRESS: "127.0.0.1",
        STORE_PORT: str(port),
        SECRET_KEY: encode_key(bytes(32)),
    }
    with pytest.raises(SystemExit) as end:
        membership.membership(environ)
    assert end.value.code == DRIVER_LOST
    lost = _LostStore()
    lost.lost = True
    with pytest.raises(SystemExit) as end:
        Membership(lost, "w4").form(lambda: None, 30)
    assert end.value.code == DRIVER_LOST
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "w3 ends before it could begin: cannot reach the job's store at 127.0.0.1:" in said[0]
    assert said[1] == "worker w4 ends before it could begin: nobody answers"


class _TornStore(MemoryStore):
    """A store whose connection breaks once."""

    is_torn = False

    def try_get(self, key: str) -> bytes | None:
        if not self.is_torn:
            self.is_torn = True
            raise ConnectionError("reset by peer")
        return super().try_get(key)


def test_a_connection_that_breaks_once_does_not_keep_a_worker_out():
    store = _TornStore()
    publish(store, decision(1, "w0", "start"))
    member, breaks = Membership(store, "w0"), [True]

    def start() -> None:
        if breaks.pop():
            breaks.append(False)
            raise ConnectionError("lost the store")
        meet(member)

    member.form(start, 30)
    assert store.is_torn
    assert store.try_get(answer_key("broken", 1, "w0")) == b"lost the store"
    assert member.generation is not None


@pytest.mark.parametrize("goodbye", ["", "the worker's", "the driver's"])
def test_a_driver_that_is_gone_is_an_error_unless_somebody_said_goodbye(
    goodbye: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(membership, "_LAST_WORDS", 0.01)
    monkeypatch.setattr(membership.os, "_exit", lambda code: None)
    store = _LostStore()
    publish(store, decision(1, "w0", "start"))
    member = Membership(store, "w0")
    before = set(threading.enumerate())
    member.form(lambda: meet(member), 30)
    (watcher,) = set(threading.enumerate()) - before
    if goodbye == "the worker's":
        member.retire()
    elif goodbye == "the driver's":
        told = threading.Event()
        member.on_break = lambda reason, generation: told.set()
        publish(store, decision(2, "", "failure", "w0"))
        assert told.wait(30)
    store.lost = True
    watcher.join(30)
    assert not watcher.is_alive()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("gone or out of reach" in error for error in errors) == (goodbye == "")


def test_a_worker_that_never_had_a_place_ends_with_the_job():
    store = MemoryStore()
    publish(store, decision(1, "w0", "start"), decision(2, "", "failure", "w0"))
    late = Membership(store, "w1")
    with pytest.raises(SystemExit) as left:
        late.form(lambda: None, 30)
    assert left.value.code == 0


def test_an_elastic_worker_is_recognised_first():
    environ = {"HOROVOD_ELASTIC": "1", "HOROVOD_WORKER_ID": "w3", "HOROVOD_RANK": "0"}
    assert is_elastic(environ)
    assert isinstance(detect(environ), Elastic)
    assert not is_elastic({"HOROVOD_ELASTIC": "1"})
    assert not is_elastic({"HOROVOD_WORKER_ID": "w3"})
