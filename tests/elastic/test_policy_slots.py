"""Slots and local ranks of an elastic job, whoever is lost and replaced, without processes.

A script chooses its GPU once, by the first local rank that its process has. So no two workers of a
host may begin with the same local rank while both live, although local ranks change in between.
"""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from horovod.common.store import MemoryStore
from horovod.common.topology import Slot
from horovod.runner.elastic.job_state import JobState, Limits, Process, number_of
from horovod.runner.elastic.liveness import DecisionLog
from horovod.runner.elastic.policy import SETTLE_SECONDS, expect_assignments, make_plan

LIMITS = Limits(num_proc=1, min_np=1, elastic_timeout=1e9)


class Job:
    """Executes plans as the driver does; its processes start and end when a test says so."""

    def __init__(self, hosts: Mapping[str, int], limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.state = JobState(hosts=dict(hosts), hosts_known=True, now=1.0)
        self.places: dict[int, Slot] = {}  # of the newest decision, by worker
        self.expected: dict[int, Slot] = {}  # what workers found in their environment
        self.first: dict[int, Slot] = {}  # in the first decision of each worker
        self.is_over = False
        self._log = DecisionLog(self.state, MemoryStore())

    def reconcile(self) -> None:
        state = self.state
        plan = make_plan(state, self.limits)
        self.is_over = plan.ending is not None
        if plan.begin_anew:
            state.begin_anew()
        for worker in plan.stop:
            state.alive[worker].is_dismissed = True
        if plan.proposal is not None:
            decision = self._log.announce(plan.proposal)
            self.places = {number_of(name): place for name, place in decision.slots.items()}
            state.assign_ranks(plan.proposal.members, {w: p.rank for w, p in self.places.items()})
            for worker, place in self.places.items():
                self.first.setdefault(worker, place)
            state.mark_formed(state.number)
        for host in plan.start:
            process = state.add_process(host)
            process.pid = 1 << 30  # it has started, though no process can have that number
            self.expected[process.number] = expect_assignments(state, self.limits)[process.number]

    def make_ready(self, *workers: int) -> None:
        """These processes wait for a place, and nobody else has become ready for a while."""
        for worker in workers:
            self.state.alive[worker].ready_at = self.state.now
        self.state.now += SETTLE_SECONDS + 1
        self.reconcile()

    def kill(self, *workers: int) -> None:
        for worker in workers:
            self.state.note_failure(self.state.alive[worker], -9)
        self.reconcile()

    def local_ranks(self) -> dict[int, int]:
        return {worker: place.local_rank for worker, place in self.places.items()}

    def ranks(self) -> dict[int, int]:
        return {worker: place.rank for worker, place in self.places.items()}


def running(hosts: Mapping[str, int]) -> Job:
    """A job that has all its workers."""
    job = Job(hosts)
    job.reconcile()
    job.make_ready(*job.state.alive)
    return job


# -- what users see ------------------------------------------------------------------------------


def test_a_replacement_takes_the_slot_of_the_lost_worker():
    job = running({"a": 3})
    job.kill(1)
    assert job.local_ranks() == {0: 0, 2: 1}, "contiguous while a slot is empty"
    assert job.expected[3].local_rank == 1
    job.make_ready(3)
    assert job.local_ranks() == {0: 0, 3: 1, 2: 2}
    assert job.ranks() == {0: 0, 2: 1, 3: 2}, "ranks go by age all the same"


def test_the_oldest_is_rank_0_although_a_new_worker_has_local_rank_0():
    job = running({"a": 2, "b": 2})
    job.kill(0)
    job.make_ready(4)
    assert job.local_ranks() == {1: 1, 4: 0, 2: 0, 3: 1}
    assert job.ranks() == {1: 0, 4: 1, 2: 2, 3: 3}
    across = {w: (place.cross_rank, place.cross_size) for w, place in job.places.items()}
    assert across == {1: (0, 2), 4: (0, 2), 2: (1, 2), 3: (1, 2)}


def test_replacements_that_join_together_have_the_slots_in_which_they_were_started():
    job = running({"a": 4})
    job.kill(1, 3)
    job.kill(2)
    assert {worker: job.expected[worker].local_rank for worker in (4, 5, 6)} == {4: 1, 5: 3, 6: 2}
    job.make_ready(4, 5, 6)
    assert job.local_ranks() == {0: 0, 4: 1, 6: 2, 5: 3}


def test_who_is_ready_first_takes_the_lowest_slot():
    """Its script chooses a GPU by that slot at once; who is late must choose another one."""
    job = running({"a": 4})
    job.kill(1, 2)
    assert [job.state.alive[worker].index for worker in (4, 5)] == [1, 2]
    job.make_ready(5)
    assert job.local_ranks() == {0: 0, 5: 1, 3: 2}
    job.make_ready(4)
    assert job.local_ranks() == {0: 0, 5: 1, 4: 2, 3: 3}
    assert job.local_ranks()[3] == job.first[3].local_rank


def test_a_job_that_begins_without_a_worker_has_room_for_its_replacement():
    job = Job({"a": 3})
    job.reconcile()
    job.state.alive[0].ready_at = job.state.alive[2].ready_at = job.state.now
    job.kill(1)
    assert job.local_ranks() == {0: 0, 2: 1}
    job.make_ready(3)
    assert job.local_ranks() == {0: 0, 2: 1, 3: 2}


def test_the_slot_of_a_process_that_is_about_to_end_is_free():
    job = running({"a": 2})
    job.state.hosts = {"a": 1}
    job.reconcile()
    job.state.hosts = {"a": 2}
    job.reconcile()
    assert job.state.alive[2].index == 2, "the cores of the process that still ends are its own"
    job.make_ready(2)
    assert {worker: process.index for worker, process in job.state.alive.items()} == {
        0: 0,
        1: 2,
        2: 1,
    }


# -- whatever happens ----------------------------------------------------------------------------


class AnyFate(RuleBasedStateMachine):
    """Any order of losses, replacements, and changes of the hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.job = Job({"a": 4, "b": 1, "c": 3})
        self.shrunk: set[str] = set()  # hosts that have offered fewer slots than before
        self.slots: dict[int, int] = {}  # of all who have had a place
        self.job.reconcile()

    def pick(self, data: st.DataObject, processes: list[Process]) -> set[int]:
        numbers = [process.number for process in processes]
        return data.draw(st.sets(st.sampled_from(numbers), min_size=1))

    def starting(self) -> list[Process]:
        return [p for p in self.job.state.newcomers() if p.ready_at is None]

    @precondition(lambda self: self.starting())
    @rule(data=st.data())
    def become_ready(self, data: st.DataObject) -> None:
        self.job.make_ready(*self.pick(data, self.starting()))

    @precondition(lambda self: self.starting())
    @rule()
    def all_become_ready(self) -> None:
        self.job.make_ready(*(process.number for process in self.starting()))

    @precondition(lambda self: self.job.state.alive)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        state = self.job.state
        state.fruitless_starts = 0  # this job never gives up
        self.job.kill(*self.pick(data, list(state.alive.values())))

    @precondition(lambda self: self.job.state.members())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        state = self.job.state
        for worker in self.pick(data, state.members()):
            state.alive[worker].is_leaving = True
            state.departed_workers.append(worker)
        self.job.reconcile()

    @rule()
    def those_without_a_place_end(self) -> None:
        state = self.job.state
        for process in list(state.alive.values()):
            if process.is_ending or (process.joined and process.number not in state.placed_workers):
                del state.alive[process.number]
        self.job.reconcile()

    @rule(host=st.sampled_from("abc"), slots=st.integers(1, 5))
    def offer(self, host: str, slots: int) -> None:
        state = self.job.state
        if slots < state.hosts[host]:
            self.shrunk.add(host)
        state.hosts = {**state.hosts, host: slots}
        self.job.reconcile()

    @rule()
    def time_passes(self) -> None:
        self.job.state.now += 100.0
        self.job.reconcile()

    def members_of(self, host: str) -> list[Process]:
        """Return the members of the newest decision that live on `host`, in the order of slots."""
        alive = self.job.state.alive
        there = [alive[w] for w in self.job.places if w in alive and alive[w].host == host]
        return sorted(there, key=lambda process: process.index)

    @invariant()
    def the_job_goes_on(self) -> None:
        assert not self.job.is_over

    @invariant()
    def nobody_shares_a_slot(self) -> None:
        slots = [(p.host, p.index) for p in self.job.state.alive.values()]
        assert len(set(slots)) == len(slots)

    @invariant()
    def a_slot_never_changes_after_the_first_decision(self) -> None:
        for process in self.job.state.alive.values():
            if process.joined is not None and process.number in self.job.state.placed_workers:
                assert self.slots.setdefault(process.number, process.index) == process.index

    @invariant()
    def a_first_local_rank_is_the_slot(self) -> None:
        for worker, slot in self.slots.items():
            assert self.job.first[worker].local_rank == slot

    @invariant()
    def local_ranks_are_contiguous_in_the_order_of_slots(self) -> None:
        for host in "abc":
            places = [place for place in self.job.places.values() if place.hostname == host]
            assert sorted(place.local_rank for place in places) == list(range(len(places)))
            assert all(place.local_size == len(places) for place in places)
            ordered = [self.job.places[p.number].local_rank for p in self.members_of(host)]
            assert ordered == sorted(ordered)

    @invariant()
    def in_a_complete_host_local_ranks_are_slots(self) -> None:
        for host in set("abc") - self.shrunk:
            members = self.members_of(host)
            if len(members) == self.job.state.hosts[host]:
                for process in members:
                    place = self.job.places[process.number]
                    assert place.local_rank == process.index
                    assert place.local_rank == self.job.first[process.number].local_rank


TestAnyFate = AnyFate.TestCase
