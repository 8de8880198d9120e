"""The policy of elastic jobs, without processes."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.runner.elastic.discovery import Blacklist
from horovod.runner.elastic.job_state import JobState, Limits, Process
from horovod.runner.elastic.policy import ElasticPlan, arrange, expect_assignments, make_plan
from horovod.runner.elastic.termination import Ending
from horovod.runner.output.report import Exit
from tests.effort import examples
from tests.elastic.parts import moment

LIMITS = Limits(num_proc=2, min_np=2, max_np=4)
FAILURE = Exit(rank=0, pid=7, code=-9, host="a", worker=0)
ENDED = {0: Exit(rank=0, pid=7, code=0, host="a")}


def member(number: int, host: str = "a", joined: int = 1) -> Process:
    return Process(number, host, joined=joined, seat=number)


def new(number: int, host: str = "a", ready_at: float | None = None) -> Process:
    return Process(number, host, ready_at=ready_at)


def running(*workers: Process, **details: object) -> JobState:
    """A job that trains."""
    facts = {"now": 100.0, "number": 1, "is_formed": True, "hosts": {"a": 4}, "workers": workers}
    return moment(**{**facts, **details})


# -- beginning -----------------------------------------------------------------------------------


def test_nothing_starts_without_enough_slots():
    plan = make_plan(moment(now=5.0, hosts={"a": 1}), LIMITS)
    assert plan == ElasticPlan(short_since=5.0)


def test_all_slots_are_used_up_to_the_maximum():
    plan = make_plan(moment(now=0.0, hosts={"a": 3, "b": 3}), LIMITS)
    assert plan.start == ("a", "a", "a", "b")


def test_the_first_decision_waits_for_all_that_start():
    workers = [new(0, ready_at=1.0), new(1, ready_at=2.0), new(2)]
    view = moment(now=3.0, hosts={"a": 3}, workers=workers)
    assert make_plan(view, LIMITS).proposal is None
    proposal = make_plan(moment(view, now=31.5), LIMITS).proposal
    assert proposal is not None, "but not for ever"
    assert (proposal.kind, proposal.added) == ("start", (0, 1))


def test_the_first_decision_waits_for_a_host_that_has_just_connected():
    view = moment(now=3.0, hosts={"a": 2, "b": 1}, workers=[new(0, "a", 1.0), new(1, "a", 1.0)])
    plan = make_plan(view, LIMITS)
    assert (plan.start, plan.proposal) == (("b",), None)


def test_places_follow_the_order_of_hosts_not_of_starting():
    workers = [new(0, "b", 1.0), new(1, "b", 1.0), new(2, "a", 1.0)]
    proposal = make_plan(moment(now=2.0, hosts={"a": 1, "b": 2}, workers=workers), LIMITS).proposal
    assert proposal is not None
    places = arrange(proposal.members)
    assert [places[worker].rank for worker in (2, 0, 1)] == [0, 1, 2]


def test_replacements_wait_until_it_is_clear_whether_all_fail():
    view = moment(now=3.0, hosts={"a": 3}, workers=[new(1)], failures=[FAILURE])
    assert make_plan(view, LIMITS).start == ()
    ready = moment(view, workers=[new(1, ready_at=2.0)])
    assert make_plan(ready, LIMITS).start == ("a", "a")


# -- losses --------------------------------------------------------------------------------------


def test_a_loss_is_decided_at_once_and_the_replacement_comes_later():
    view = running(member(0), member(2), failed_workers=[1], hosts={"a": 3})
    plan = make_plan(view, LIMITS)
    assert plan.proposal is not None
    assert (plan.proposal.kind, plan.proposal.lost) == ("failure", (1,))
    assert [worker.number for worker in plan.proposal.members] == [0, 2]
    assert plan.start == ("a",)
    waiting = running(member(0), member(2), new(3), number=2, hosts={"a": 3})
    assert make_plan(waiting, LIMITS) == ElasticPlan()
    joining = running(member(0), member(2), new(3, ready_at=99.9), number=2, hosts={"a": 3})
    proposal = make_plan(joining, LIMITS).proposal
    assert proposal is not None
    assert (proposal.kind, proposal.added) == ("added", (3,))


def test_survivors_below_the_minimum_are_told_but_nobody_joins_them_too_early():
    limits = dataclasses.replace(LIMITS, min_np=3)
    plan = make_plan(running(member(0), failed_workers=[1, 2]), limits)
    assert plan.proposal is not None
    assert (len(plan.proposal.members), plan.proposal.min_np) == (1, 3)
    waiting = running(member(0), new(3, ready_at=1.0), new(4), number=2)
    assert make_plan(waiting, limits).proposal is None, "two are still too few"


def test_when_all_are_lost_others_begin_anew_but_not_before_the_old_are_surely_gone():
    view = running(
        new(2, ready_at=90.0), new(3, ready_at=90.0), failed_workers=[0, 1], fenced_until=101.0
    )
    assert make_plan(view, LIMITS).proposal is None
    proposal = make_plan(moment(view, now=102.0), LIMITS).proposal
    assert proposal is not None
    assert (proposal.kind, proposal.lost, proposal.added) == ("start", (0, 1), (2, 3))


def test_the_reset_limit():
    limits = dataclasses.replace(LIMITS, reset_limit=0)
    lost = running(member(0), member(1), failed_workers=[2], last_failure=FAILURE)
    ending = make_plan(lost, limits).ending
    assert ending is not None
    assert "exceeded limit: 0 (--reset-limit)" in ending.problem
    assert ending.failure == FAILURE
    grown = running(member(0), member(1), new(2, ready_at=1.0))
    assert make_plan(grown, limits) == ElasticPlan(start=("a",)), "growing is only left out"


def test_when_all_are_lost_what_went_wrong_is_forgotten_and_others_start():
    view = running(failed_workers=[0, 1], failures=[FAILURE], have_met=True)
    plan = make_plan(view, LIMITS)
    assert plan == ElasticPlan(start=("a",) * 4, begin_anew=True, short_since=100.0)
    assert not make_plan(
        running(member(1), failed_workers=[0], failures=[FAILURE]), LIMITS
    ).begin_anew


def test_nobody_comes_to_those_who_wait_when_the_launcher_is_told_to_end():
    view = running(member(0), too_few=True, interrupted=True)
    assert make_plan(view, LIMITS) == ElasticPlan(release=True)
    training = running(member(0), member(1), interrupted=True)
    assert make_plan(training, LIMITS) == ElasticPlan()


def test_the_end_comes_before_any_plan():
    """`test_termination` has the reasons."""
    plan = make_plan(running(ended_well=ENDED, failed_workers=[0]), LIMITS)
    assert plan == ElasticPlan(ending=Ending())


def test_a_leaver_is_not_a_failure():
    proposal = make_plan(running(member(0), member(1), departed_workers=[2]), LIMITS).proposal
    assert proposal is not None
    assert (proposal.kind, proposal.lost) == ("removed", ())


def test_who_has_finished_is_not_replaced_and_not_missed_until_asked_for():
    view = running(member(0), member(1), finished_workers=[2], finishing=True)
    assert make_plan(view, LIMITS) == ElasticPlan()
    proposal = make_plan(moment(view, decision_requested=True), LIMITS).proposal
    assert proposal is not None
    assert (proposal.kind, proposal.lost, proposal.min_np) == ("failure", (2,), 1)


# -- hosts ---------------------------------------------------------------------------------------


def test_a_host_that_is_gone_loses_its_workers_in_order():
    view = running(member(0, "a"), member(1, "b"), member(2, "b"), hosts={"b": 2})
    proposal = make_plan(view, LIMITS).proposal
    assert proposal is not None
    assert (proposal.kind, proposal.lost) == ("removed", ())
    assert [worker.number for worker in proposal.members] == [1, 2]


def test_a_blacklisted_host_is_left_only_if_enough_others_stay():
    workers = [member(0, "a"), member(1, "b"), member(2, "b")]
    view = running(*workers, hosts={"a": 1, "b": 2}, blacklisted=frozenset({"a"}))
    proposal = make_plan(view, LIMITS).proposal
    assert proposal is not None
    assert [worker.number for worker in proposal.members] == [1, 2]
    alone = moment(view, blacklisted=frozenset({"b"}))
    assert make_plan(alone, LIMITS) == ElasticPlan()


def test_the_state_is_handed_over_before_its_last_holder_goes():
    limits = Limits(num_proc=1, min_np=1)
    view = running(member(0, "a"), new(1, "b", 99.0), hosts={"b": 1})
    first = make_plan(view, limits).proposal
    assert first is not None
    assert [worker.number for worker in first.members] == [0, 1]
    old = dataclasses.replace(member(0, "a"), has_state=True)
    heir = member(1, "b", joined=2)
    meeting = running(old, heir, hosts={"b": 1}, number=2, is_formed=False, last_formed=1)
    assert make_plan(meeting, limits) == ElasticPlan()
    again = moment(meeting, number=3)  # worker 1 has met nobody yet, in two decisions
    assert make_plan(again, limits) == ElasticPlan()
    met = moment(meeting, is_formed=True, last_formed=2)
    assert make_plan(met, limits) == ElasticPlan(), "it has met the other, but not its state"
    received = [old, dataclasses.replace(heir, has_state=True)]
    then = make_plan(moment(met, workers=received), limits).proposal
    assert then is not None
    assert [worker.number for worker in then.members] == [1]


def test_the_oldest_worker_stays_while_it_may_be_forming_the_first_generation():
    limits = Limits(num_proc=1, min_np=1)
    workers = [member(0, "a"), member(1, "b", joined=2)]
    view = running(*workers, hosts={"b": 1}, number=2, is_formed=False)
    assert make_plan(view, limits) == ElasticPlan()
    begun = moment(view, last_formed=1)  # the first generation was only late to say so
    assert make_plan(begun, limits) == ElasticPlan()
    only_oldest = make_plan(moment(view, hosts={"a": 1}), limits).proposal
    assert only_oldest is not None
    assert [worker.number for worker in only_oldest.members] == [0]


# -- whatever happens ----------------------------------------------------------------------------

HOSTS = ("a", "b", "c")


@st.composite
def views(draw: st.DrawFn) -> tuple[JobState, Limits]:
    number = draw(st.integers(0, 5))
    count = draw(st.integers(0, 8))
    workers = []
    for identity in range(count):
        host = draw(st.sampled_from(HOSTS))
        if number and draw(st.booleans()):
            joined = draw(st.integers(1, number))
            has_state = draw(st.booleans())
            workers.append(
                Process(identity, host, joined=joined, seat=identity, has_state=has_state)
            )
        else:
            ready = draw(st.none() | st.floats(90, 100))
            workers.append(Process(identity, host, ready_at=ready))
    gone = st.lists(st.integers(20, 25), max_size=2, unique=True)
    lost = draw(gone) if number else []
    min_np = draw(st.integers(1, 4))
    limits = Limits(
        num_proc=min_np,
        min_np=min_np,
        max_np=draw(st.none() | st.integers(min_np, 8)),
        reset_limit=draw(st.none() | st.integers(0, 5)),
    )
    view = moment(
        now=100.0,
        number=number,
        is_formed=draw(st.booleans()),
        hosts=draw(st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 4))),
        blacklisted=frozenset(draw(st.sets(st.sampled_from(HOSTS), max_size=1))),
        workers=workers,
        failed_workers=lost,
        failures=[FAILURE] * draw(st.integers(0, 1)),
        have_met=draw(st.booleans()),
        fruitless_starts=draw(st.integers(0, 1)),
        short_since=draw(st.none() | st.floats(-1000, 100)),
        no_hosts=draw(st.sampled_from(["", "", "", "they are gone"])),
        ended_well=draw(st.sampled_from([{}, ENDED])),
        finishing=draw(st.booleans()),
        interrupted=draw(st.booleans()),
    )
    return view, limits


@settings(max_examples=examples(300), deadline=None)
@given(views())
def test_rules_that_always_hold(case: tuple[JobState, Limits]):
    view, limits = case
    plan = make_plan(view, limits)
    proposal = plan.proposal
    alive = {worker.number: worker for worker in view.workers}
    assert set(plan.stop) <= {w.number for w in view.workers if w.joined is None}
    assert all(host in view.usable for host in plan.start)
    if plan.ending is not None:
        assert plan == ElasticPlan(ending=plan.ending), "nothing else is to be done"
        return
    if view.is_over and (view.number or view.interrupted):
        assert not plan.start
    placed = Counter(w.host for w in view.workers if w.number not in plan.stop)
    for host, extra in Counter(plan.start).items():
        stays = proposal.members if proposal else view.members()
        there = sum(w.host == host for w in stays)
        assert there + extra <= max(view.hosts[host], placed[host])
    if proposal is None:
        return
    assert proposal.members, "a decision without workers would lose the state"
    assert {worker.number for worker in proposal.members} <= set(alive)
    assert not set(proposal.lost) & {worker.number for worker in proposal.members}
    ages = [worker.age for worker in proposal.members]
    assert ages == sorted(ages), "the oldest comes first"
    survivors = [w for w in proposal.members if w.number not in proposal.added]
    if view.number:
        assert {w.number for w in survivors} <= view.placed_workers, "nobody else was there before"
    if survivors:
        oldest = min(survivors, key=lambda w: w.age)
        assert arrange(proposal.members)[oldest.number].rank == 0
    if limits.max_np is not None and proposal.added:
        assert len(proposal.members) <= max(limits.max_np, len(survivors))
    if limits.reset_limit is not None and not view.is_over:
        assert view.number <= limits.reset_limit


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(1, 4)), min_size=1, max_size=12))
def test_places_are_complete_and_hosts_are_together(people: list[tuple[str, int]]):
    workers = [member(n, host, joined) for n, (host, joined) in enumerate(people)]
    places = arrange(workers)
    ordered = sorted(places.values(), key=lambda slot: slot.rank)
    assert [slot.rank for slot in ordered] == list(range(len(workers)))
    runs = [slot.hostname for i, slot in enumerate(ordered) if not slot.local_rank]
    assert len(runs) == len(set(runs)), "the ranks of a host are neighbours"
    for slot in ordered:
        local = [other for other in ordered if other.hostname == slot.hostname]
        assert slot.local_size == len(local)
        across = [other for other in ordered if other.local_rank == slot.local_rank]
        assert slot.cross_size == len(across)
        assert across[slot.cross_rank] == slot


# -- the blacklist -------------------------------------------------------------------------------


def test_a_host_is_blacklisted_after_so_many_failures_for_good():
    record = Blacklist(max_failures=2)
    assert not record.record_failure("a", 0.0)
    assert not record.is_blacklisted("a", 0.0)
    assert record.record_failure("a", 1.0)
    assert record.is_blacklisted("a", 1e9)
    assert record.is_for_good("a")
    assert not record.is_blacklisted("b", 1.0)


def test_the_cooldown_doubles_from_the_lower_to_the_upper_end():
    record = Blacklist(1, (10, 35), dice=lambda: 0.0)
    now = 0.0
    for expected in (10, 20, 35, 35):
        assert record.record_failure("a", now)
        assert not record.record_failure("a", now + 1), "it counts once"
        assert record.is_blacklisted("a", now + expected - 0.1)
        assert not record.is_blacklisted("a", now + expected)
        now += expected
    assert not record.is_for_good("a")


@given(st.floats(0, 1), st.integers(1, 8))
def test_the_cooldown_stays_in_its_range(dice: float, times: int):
    record = Blacklist(1, (2, 20), dice=lambda: dice)
    for attempt in range(times):
        record.record_failure("a", 1000.0 * attempt)
        assert record.is_blacklisted("a", 1000.0 * attempt + 1.99)
        assert not record.is_blacklisted("a", 1000.0 * attempt + 20.0)


# -- places before the first decision ----------------------------------------------------------


def test_a_worker_starts_with_the_place_that_it_will_have():
    view = moment(
        now=0.0, hosts={"a": 2, "b": 3}, workers=[new(0, "b")], resting_hosts=frozenset("a")
    )
    place = expect_assignments(view, LIMITS)[0].topology
    assert (place.rank, place.size, place.local_rank, place.cross_rank) == (2, 4, 0, 1)
    view = running(member(0), member(1, "b"), new(2, "b"), hosts={"a": 1, "b": 2})
    place = expect_assignments(view, LIMITS)[2].topology
    assert (place.rank, place.size, place.local_rank, place.cross_rank) == (2, 3, 1, 0)


def test_who_finishes_before_the_first_decision_is_not_replaced_and_not_waited_for():
    view = moment(now=0.0, hosts={"a": 2, "b": 2}, finishing=True, ended_early=["a"])
    workers = [new(1, "a", ready_at=1.0)]
    plan = make_plan(moment(view, workers=workers), LIMITS)
    assert plan == ElasticPlan(start=("b", "b")), "slots that were never used are"
    workers += [new(2, "b", ready_at=1.0), new(3, "b")]
    assert make_plan(moment(view, workers=workers), LIMITS) == ElasticPlan()
    workers[-1] = new(3, "b", ready_at=2.0)
    proposal = make_plan(moment(view, workers=workers), LIMITS).proposal
    assert proposal is not None
    assert [(w.number, w.joined) for w in proposal.members] == [(1, 1), (2, 1), (3, 1)]


def test_who_ends_before_others_are_started_does_not_end_the_job():
    ended = moment(
        now=0.0,
        hosts={"a": 2, "b": 1},
        resting_hosts=frozenset("a"),
        hosts_connecting=True,
        finishing=True,
        ended_well=ENDED,
        ended_early=["b"],
    )
    limits = Limits(num_proc=3, min_np=3, max_np=3)
    assert make_plan(ended, limits) == ElasticPlan(), "the other host is on its way"
    connected = moment(ended, resting_hosts=frozenset(), hosts_connecting=False)
    assert make_plan(connected, limits) == ElasticPlan(start=("a", "a"))
    waiting = moment(ended, workers=[new(1, "b", ready_at=0.0)])
    assert make_plan(waiting, limits) == ElasticPlan(), "nobody begins without them"
    for change in (
        {"hosts_connecting": False},  # it cannot be reached
        {"interrupted": True},
        {"number": 1},
    ):
        assert make_plan(moment(ended, **change), limits).ending is not None


def test_a_member_that_has_not_trained_takes_a_slot_that_became_free():
    """It has not learned its local rank: alone on its host it begins with 0, and keeps that."""
    waiting = dataclasses.replace(member(2, joined=2), index=1)
    members = [member(0, "b"), member(1, "b"), waiting]
    job = running(*members, number=2, is_formed=False, last_formed=1, decision_requested=True)
    assert slots_on_a(job) == {2: 0}
    assert slots_on_a(moment(job, last_formed=2)) == {2: 1}, "it has a local rank by now"
    chosen = dataclasses.replace(waiting, has_met=True)
    assert slots_on_a(moment(job, workers=[*members[:2], chosen])) == {2: 1}, "it says so itself"
    ready = dataclasses.replace(new(3, ready_at=99.0), index=0)
    both = slots_on_a(moment(job, workers=[*members, ready]))
    assert sorted(both.values()) == [0, 1], "never the same"


def slots_on_a(job: JobState) -> dict[int, int]:
    proposal = make_plan(job, LIMITS).proposal
    assert proposal is not None
    return {worker.number: worker.index for worker in proposal.members if worker.host == "a"}
