"""What the driver knows of workers and of how the job goes, without processes."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from horovod.common.generations.decisions import Decision
from horovod.runner.elastic.job_state import JobState, Process, name_of, number_of
from horovod.runner.elastic.termination import Ending, make_outcome
from horovod.runner.output.report import Exit


def placed(*hosts: str, number: int = 1) -> JobState:
    """A job whose workers all have a place in decision `number`, ranks in this order."""
    state = JobState()
    for host in hosts:
        state.add_process(host)
    put(state, list(state.alive), number)
    return state


def put(state: JobState, workers: list[int], number: int) -> None:
    state.note_decision(Decision(number, {}, "a test", "start"))
    members = [
        dataclasses.replace(state.alive[w], joined=state.alive[w].joined or number, seat=seat)
        for seat, w in enumerate(workers)
    ]
    state.assign_ranks(members, {worker: rank for rank, worker in enumerate(workers)})


def ids(processes: list[Process]) -> list[int]:
    return [process.number for process in processes]


class Books(RuleBasedStateMachine):
    """Any order of what can happen to workers."""

    def __init__(self) -> None:
        super().__init__()
        self.state = JobState()
        self.number = 0

    @rule(host=st.sampled_from("abc"))
    def start(self, host: str) -> None:
        before = {p.index for p in self.state.workers_on(host)}
        process = self.state.add_process(host)
        assert process.index not in before
        assert set(range(process.index)) <= before, "the lowest free slot"
        assert process.joined is None

    @precondition(lambda self: self.state.alive)
    @rule(data=st.data())
    def decide(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.state.alive)), unique=True))
        self.number += 1
        put(self.state, chosen, self.number)
        assert (
            self.state.failed_workers
            == self.state.departed_workers
            == self.state.finished_workers
            == []
        )

    @precondition(lambda self: self.state.alive)
    @rule(data=st.data(), code=st.sampled_from([1, 3, -9]))
    def fail(self, data: st.DataObject, code: int) -> None:
        process = self.state.alive[data.draw(st.sampled_from(sorted(self.state.alive)))]
        was_member = process.joined is not None
        failure = self.state.note_failure(process, code)
        assert failure.code == code
        assert self.state.last_failure == failure
        # A worker that the newest decision has left out is missed until that one has formed.
        is_missed = process.number in self.state.placed_workers or (
            was_member and not self.state.is_formed
        )
        assert (process.number in self.state.failed_workers) == is_missed

    @precondition(lambda self: self.state.alive)
    @rule(data=st.data(), flag=st.sampled_from(["done", "leaving", "dismissed"]))
    def mark(self, data: st.DataObject, flag: str) -> None:
        process = self.state.alive[data.draw(st.sampled_from(sorted(self.state.alive)))]
        setattr(process, flag, True)

    @invariant()
    def slots_are_not_shared(self) -> None:
        slots = [(p.host, p.index) for p in self.state.alive.values()]
        assert len(set(slots)) == len(slots)

    @invariant()
    def numbers_are_never_used_again(self) -> None:
        assert all(number < self.state.next_number for number in self.state.alive)

    @invariant()
    def the_policy_sees_each_once(self) -> None:
        seen = ids(self.state.workers)
        assert len(set(seen)) == len(seen)
        assert seen == ids([*self.state.members(), *self.state.newcomers()])
        assert set(seen) <= set(self.state.alive)
        assert not any(
            self.state.alive[w].is_done or self.state.alive[w].is_dismissed for w in seen
        )

    @invariant()
    def those_who_entered_are_not_behind(self) -> None:
        assert set(ids(self.state.unresponsive_workers(self.number))) >= {
            p.number for p in self.state.members() if not p.heard and self.number
        }
        assert self.state.unresponsive_workers(0) == []


TestBooks = Books.TestCase


def test_names_and_numbers():
    assert [number_of(name_of(number)) for number in (0, 7, 12)] == [0, 7, 12]
    state = placed("a", "b")
    assert [str(p) for p in (*state.alive.values(), state.add_process("c"))] == [
        "w0 (rank 0, a)",
        "w1 (rank 1, b)",
        "w2 (c)",
    ]


def test_who_has_heard_of_a_decision_may_still_be_absent_from_its_generation():
    state = placed("a", "a", "b")
    first, second, third = state.alive.values()
    first.heard, first.entered = 2, (2, 0)
    second.heard = 2
    assert state.unresponsive_workers(2) == [third]
    assert state.absent_members(2, 0) == [second, third]
    assert state.absent_members(2, 1) == [first, second, third]
    third.joined = 3
    assert state.unresponsive_workers(2) == [], "it need not know a decision from before it joined"
    assert state.unresponsive_workers(3) == [first, second, third]
    third.joined, third.is_leaving = 1, True
    assert state.unresponsive_workers(2) == []
    assert state.absent_members(2, 0) == [second]


def test_who_joins_in_another_slot_exchanges_it_with_the_process_there():
    state = placed("a")
    late, early, elsewhere = state.add_process("a"), state.add_process("a"), state.add_process("b")
    assert [p.index for p in (late, early, elsewhere)] == [1, 2, 0]
    state.assign_ranks([dataclasses.replace(early, joined=2, index=1)], {early.number: 1})
    assert [p.index for p in (late, early, elsewhere)] == [2, 1, 0]
    assert state.alive[0].index == 0


def test_who_was_left_out_counts_when_all_others_are_lost():
    state = placed("a", "b")
    old, heir = state.alive.values()
    put(state, [heir.number], 2)
    old.has_state = heir.has_state = True
    assert state.members() == [heir]
    state.note_failure(heir, -9)
    assert state.members() == [old]
    state.finishing = True
    assert state.members() == []
    state.finishing, old.is_leaving = False, True
    assert state.members() == []


def test_who_was_left_out_counts_while_no_other_has_the_state():
    state = placed("a", "b")
    old, heir = state.alive.values()
    old.has_state = True
    put(state, [heir.number], 2)
    assert state.members() == [old, heir]
    heir.has_state = True
    assert state.members() == [heir]


def test_who_has_chosen_a_device_keeps_the_slot_also_when_left_out():
    state = placed("a")
    old, heir = state.alive[0], state.add_process("a")
    old.has_met = True
    state.assign_ranks([dataclasses.replace(heir, joined=2, index=0)], {heir.number: 0})
    assert (old.index, heir.index) == (0, 0)


def test_an_exit_has_the_rank_that_the_worker_knew():
    state = placed("a", "a")
    process = state.alive[1]
    process.entered = (1, 0)
    put(state, [1, 0], 2)
    assert process.rank == 0
    assert process.exit(1).rank == 1, "it has not come to decision 2"
    process.entered = (2, 0)
    assert process.exit(1).rank == 0


def test_the_cause_outlives_those_who_failed_because_of_it():
    state = placed("a", "a", "b")
    cause = state.note_failure(state.alive[2], -9)
    state.alive[0].because_of = (2,)
    state.note_failure(state.alive[0], 1)
    assert state.last_failure == cause
    assert state.failed_workers == [2, 0]


def test_failures_before_a_place_count_for_the_host_only():
    state = placed("a")
    state.note_failure(state.add_process("b"), 1)
    assert state.failed_workers == []
    assert state.ended_early == ["b"]
    assert [failure.worker for failure in state.failures] == [1]


def test_hosts_for_new_workers_are_those_that_are_not_blacklisted():
    state = placed("a", "b")
    state.hosts, state.blacklisted = {"a": 1, "b": 2}, frozenset("b")
    assert (state.usable, state.slots, state.is_over) == ({"a": 1}, 1, False)
    state.interrupted = True
    assert state.is_over


def test_a_decision_takes_the_causes_along_and_answers_whoever_asked():
    state = placed("a")
    state.mark_formed(1)
    state.causes.append("a test")
    state.decision_requested = True
    put(state, [0], 2)
    assert (state.number, state.is_formed, state.decision_requested, state.causes) == (
        2,
        False,
        False,
        [],
    )
    assert state.forming_since, "the wait for the workers begins"
    first = state.forming_since
    put(state, [0], 3)
    assert state.forming_since == first, "it has not ended"
    state.mark_formed(3)
    assert not state.forming_since


def test_a_generation_that_meets_again_by_itself_is_a_wait_as_well():
    state = placed("a", "a")
    state.mark_formed(1)
    state.note_entry(state.alive[0], 1, 0)
    assert not state.forming_since
    state.note_entry(state.alive[0], 1, 1)
    assert state.forming_since
    assert state.absent_members(1, 1) == [state.alive[1]]


def test_who_lost_a_slot_before_it_came_may_not_know_that_it_had_one():
    state = placed("a", "a", "a")
    state.note_entry(state.alive[0], 1, 0)
    put(state, [2], 2)
    assert state.unaware_workers() == [state.alive[1]], "worker 0 has entered, worker 2 has a slot"
    state.alive[1].is_dismissed = True
    assert state.unaware_workers() == []


def test_failures_are_forgiven_when_somebody_ends_well_after_them():
    state = placed("a", "a", "a")
    state.note_loss(state.alive[0], -9, "killed")
    assert state.unrecovered is not None
    assert state.causes == ["w0 (rank 0, a) failed: killed"]
    state.note_success(state.alive[1])
    assert state.unrecovered is None
    state.alive[2].is_done = True
    state.note_loss(state.alive[2], 7, "exit code 7")
    assert state.bad_end is not None
    state.note_success(state.add_process("a"))
    assert state.bad_end.code == 7, "nobody can make good for that one"


def test_a_victim_does_not_hide_the_cause():
    state = placed("a", "a")
    state.note_loss(state.alive[1], 5, "exit code 5")
    state.alive[0].because_of = (1,)
    state.note_loss(state.alive[0], 1, "exit code 1")
    assert state.unrecovered is not None
    assert state.unrecovered.code == 5
    told = make_outcome(state, Ending(failure=state.unrecovered))
    assert told.first_failure == state.unrecovered
    assert [exit.rank for exit in told.exits] == [1, 0]


def test_who_left_early_is_named_when_others_failed_because_of_it():
    state = placed("a", "b")
    state.note_success(state.alive[0])
    state.alive[1].because_of = (0,)
    state.note_loss(state.alive[1], 1, "exit code 1")
    assert make_outcome(state, Ending(failure=state.unrecovered)).early_exits == [
        Exit(0, 0, 0, "a", worker=0)
    ]


def test_beginning_anew_is_counted_until_workers_meet():
    state = placed("a")
    state.mark_formed(1)
    for expected in (0, 1, 2):
        state.note_failure(state.add_process("a"), -9)
        state.begin_anew()
        assert (state.failures, state.fruitless_starts) == ([], expected), "the first had met"
    put(state, list(state.alive), 2)
    put(state, list(state.alive), 3)
    state.mark_formed(2)
    assert (state.fruitless_starts, state.have_met, state.last_formed) == (0, True, 2)
    assert not state.is_formed, "that was the one before"


def test_who_is_awaited():
    state = JobState()
    assert state.describe_awaited(["a", "b"]) == "starting, waiting for a and b"
    workers = [state.add_process("a"), state.add_process("b")]
    workers[0].ready_at = 1.0
    assert state.describe_awaited([]) == "starting, waiting for w1 (b)"
    put(state, [0, 1], 1)
    state.note_entry(workers[0], 1, 0)
    assert state.describe_awaited([]) == "forming with 2 ranks, waiting for w1 (rank 1, b)"
    state.mark_formed(1)
    assert state.describe_awaited([]) == ""
    put(state, [0], 2)
    assert state.describe_awaited([]) == "re-forming with 1 rank, waiting for w0 (rank 0, a)"
    state.shortage = "waiting for hosts"
    assert state.describe_awaited([]) == "waiting for hosts"
