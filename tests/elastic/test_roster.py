"""The driver's book of workers, without processes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from horovod.runner.elastic.policy import WorkerView
from horovod.runner.elastic.roster import Process, Roster, all_by_exit_code, name_of, number_of


def placed(*hosts: str, number: int = 1) -> Roster:
    """A roster whose workers all have a place in decision `number`, ranks in this order."""
    roster = Roster()
    for host in hosts:
        roster.new(host)
    put(roster, list(roster.alive), number)
    return roster


def put(roster: Roster, workers: list[int], number: int) -> None:
    views = [
        WorkerView(w, roster.alive[w].host, joined=roster.alive[w].joined or number, seat=seat)
        for seat, w in enumerate(workers)
    ]
    roster.place(number, views, {worker: rank for rank, worker in enumerate(workers)})


def ids(processes: list[Process]) -> list[int]:
    return [process.number for process in processes]


class Books(RuleBasedStateMachine):
    """Any order of what can happen to workers."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster()
        self.number = 0

    @rule(host=st.sampled_from("abc"))
    def start(self, host: str) -> None:
        before = {p.index for p in self.roster.on(host)}
        process = self.roster.new(host)
        assert process.index not in before
        assert set(range(process.index)) <= before, "the lowest free slot"
        assert process.joined is None

    @precondition(lambda self: self.roster.alive)
    @rule(data=st.data())
    def decide(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.roster.alive)), unique=True))
        self.number += 1
        put(self.roster, chosen, self.number)
        assert self.roster.failed == self.roster.left == self.roster.finished == []

    @precondition(lambda self: self.roster.alive)
    @rule(data=st.data(), code=st.sampled_from([1, 3, -9]))
    def fail(self, data: st.DataObject, code: int) -> None:
        process = self.roster.alive[data.draw(st.sampled_from(sorted(self.roster.alive)))]
        failure = self.roster.fail(process, code)
        assert failure.exit.code == code
        assert self.roster.last_failure == failure
        assert (process.number in self.roster.failed) == (process.number in self.roster.placed)

    @precondition(lambda self: self.roster.alive)
    @rule(data=st.data(), flag=st.sampled_from(["done", "leaving", "dismissed"]))
    def mark(self, data: st.DataObject, flag: str) -> None:
        process = self.roster.alive[data.draw(st.sampled_from(sorted(self.roster.alive)))]
        setattr(process, flag, True)

    @invariant()
    def slots_are_not_shared(self) -> None:
        slots = [(p.host, p.index) for p in self.roster.alive.values()]
        assert len(set(slots)) == len(slots)

    @invariant()
    def numbers_are_never_used_again(self) -> None:
        assert all(number < self.roster.next_number for number in self.roster.alive)

    @invariant()
    def the_policy_sees_each_once(self) -> None:
        seen = [worker.id for worker in self.roster.view()]
        assert len(set(seen)) == len(seen)
        assert seen == ids([*self.roster.members(), *self.roster.newcomers()])
        assert set(seen) <= set(self.roster.alive)
        assert not any(self.roster.alive[w].done or self.roster.alive[w].dismissed for w in seen)

    @invariant()
    def those_who_entered_are_not_behind(self) -> None:
        assert set(ids(self.roster.behind(self.number))) >= {
            p.number for p in self.roster.members() if not p.heard and self.number
        }
        assert self.roster.behind(0) == []


TestBooks = Books.TestCase


def test_names_and_numbers():
    assert [number_of(name_of(number)) for number in (0, 7, 12)] == [0, 7, 12]
    roster = placed("a", "b")
    assert roster.get("w1") is roster.alive[1]
    assert roster.get("w5") is None
    assert [str(p) for p in (*roster.alive.values(), roster.new("c"))] == [
        "w0 (rank 0, a)",
        "w1 (rank 1, b)",
        "w2 (c)",
    ]


def test_who_has_heard_of_a_decision_may_still_be_absent_from_its_generation():
    roster = placed("a", "a", "b")
    first, second, third = roster.alive.values()
    first.heard, first.entered = 2, (2, 0)
    second.heard = 2
    assert roster.behind(2) == [third]
    assert roster.absent(2, 0) == [second, third]
    assert roster.absent(2, 1) == [first, second, third]
    third.leaving = True
    assert roster.behind(2) == []
    assert roster.absent(2, 0) == [second]


def test_an_exit_has_the_rank_that_the_worker_knew():
    roster = placed("a", "a")
    process = roster.alive[1]
    process.entered = (1, 0)
    put(roster, [1, 0], 2)
    assert process.rank == 0
    assert process.exit(1).rank == 1, "it has not come to decision 2"
    process.entered = (2, 0)
    assert process.exit(1).rank == 0


def test_the_cause_outlives_those_who_failed_because_of_it():
    roster = placed("a", "a", "b")
    cause = roster.fail(roster.alive[2], -9)
    roster.alive[0].because_of = (2,)
    roster.fail(roster.alive[0], 1)
    assert roster.last_failure == cause
    assert roster.failed == [2, 0]


def test_failures_before_a_place_count_for_the_host_only():
    roster = placed("a")
    roster.fail(roster.new("b"), 1)
    assert roster.failed == []
    assert roster.ended_early == ["b"]
    assert [failure.worker for failure in roster.failures] == [1]


def test_ended_by_itself_or_by_a_signal():
    roster = placed("a", "a")
    own = roster.fail(roster.alive[0], 1)
    assert all_by_exit_code([own])
    assert not all_by_exit_code([own, roster.fail(roster.alive[1], -15)])
