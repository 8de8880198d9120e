"""Who holds the others up, and why."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.reports import ReportedStep, parse_report
from horovod.observe.dashboard.stragglers import (
    ADVICE,
    LASTING_STEPS,
    MOST_STEPS_UNTIL_NAMED,
    REASONS,
    WINDOW,
    RankView,
    Straggler,
    TypicalStep,
    Verdicts,
    find_stragglers,
)
from tests.effort import examples
from tests.observe.dashboard.simulated import START, SimulatedJob


def views(job: SimulatedJob, **more: dict[int, object]) -> dict[int, RankView]:
    found = {}
    for rank in range(job.size):
        report = parse_report(0, rank, job.encoded(rank))
        fields = {name: values[rank] for name, values in more.items() if rank in values}
        defaults = {"silent": 0.2, "process_state": "S"}
        found[rank] = RankView(
            job.host(rank), TypicalStep.of(report.steps[-WINDOW:]), **{**defaults, **fields}
        )
    return found


def kinds(found) -> dict[int, str]:
    return {rank: finding.kind for rank, finding in found.items()}


@pytest.mark.parametrize("size", [2, 3, 8, 256])
def test_ranks_that_are_alike_are_fine(size: int):
    job = SimulatedJob(size)
    job.run(WINDOW)
    assert find_stragglers(views(job), 1.0) == {}


@pytest.mark.parametrize("size", [2, 3, 256])
def test_late_in_backward(size: int):
    job = SimulatedJob(size)
    job.slow = {1: 0.04}
    job.run(WINDOW)
    found = find_stragglers(views(job), 1.0)
    assert kinds(found) == {1: "backward"}
    assert re.fullmatch(
        r"late in backward: computes (8|9)\d ms a step, others (4|5)\d ms", found[1].text
    )


def test_late_elsewhere_is_told_apart():
    job = SimulatedJob(3)
    job.slow_input = {2: 0.04}
    job.run(WINDOW)
    found = find_stragglers(views(job), 1.0)
    assert kinds(found) == {2: "compute"}
    assert "late before backward (input, forward)" in found[2].text


def test_a_slow_link_of_a_rank_and_of_a_host():
    job = SimulatedJob(8, per_host=4)
    job.slow_link = {5: 0.05}
    job.run(WINDOW)
    found = find_stragglers(views(job), 1.0)
    assert kinds(found) == {5: "link"}
    assert found[5].text.startswith("slow link: ")
    assert "compression" in found[5].advice
    job.slow_link = dict.fromkeys(range(4, 8), 0.05)
    job.run(60)
    found = find_stragglers(views(job), 1.0)
    assert kinds(found) == dict.fromkeys(range(4, 8), "link")
    assert found[5].text.startswith("slow link of node01: ")


def test_there_is_no_link_inside_one_host():
    job = SimulatedJob(4, per_host=4)
    job.slow_link = {2: 0.05}
    job.run(WINDOW)
    assert find_stragglers(views(job), 1.0) == {}


def test_one_long_step_says_nothing_about_a_rank():
    """Such as after a stop of five seconds, which the mean of ten steps would remember."""
    job = SimulatedJob(3)
    job.run(12)
    job.slow_input = {1: 5.0}
    job.run(1)
    job.slow_input = {}
    job.run(4)
    assert find_stragglers(views(job), 1.0) == {}


def test_every_finding_comes_with_something_to_try():
    assert set(ADVICE) == set(REASONS)
    for kind in REASONS:
        assert Straggler(kind, "").advice.endswith(".")


def test_several_at_once():
    job = SimulatedJob(6)
    job.slow = {1: 0.05, 4: 0.08}
    job.run(WINDOW)
    assert kinds(find_stragglers(views(job), 1.0)) == {1: "backward", 4: "backward"}


def test_stopped_is_seen_before_the_rank_is_silent():
    job = SimulatedJob(3)
    job.run(10)
    found = find_stragglers(views(job, process_state={1: "T"}, waiting={1: 2}, awaited={1: 2.5}), 1)
    assert kinds(found) == {1: "stopped"}
    assert found[1].text == "stopped by a signal (state T); 2 ranks have waited 2.5 s for it"


def test_a_rank_of_another_host_is_silent():
    job = SimulatedJob(3)
    job.run(10)
    found = find_stragglers(views(job, process_state={1: ""}, silent={1: 12.0}), 1.0)
    assert kinds(found) == {1: "silent"}
    assert "no report for 12 s" in found[1].text
    # As long as reports are rare anyway nobody is suspected.
    assert find_stragglers(views(job, silent={1: 12.0}), 10.0) == {}


def test_a_rank_that_others_wait_for():
    job = SimulatedJob(3)
    job.run(10)
    found = find_stragglers(views(job, waiting={2: 1}, awaited={2: 2.5}), 1.0)
    assert kinds(found) == {2: "awaited"}
    assert found[2].text == "late in this step: 1 rank has waited 2.5 s for it"


def test_a_rank_is_not_awaited_before_long():
    job = SimulatedJob(3)
    job.run(10)
    few = {"waiting": {2: 1}, "awaited": {2: 4.0}}
    assert kinds(find_stragglers(views(job, **few), 1.0)) == {2: "awaited"}
    job.run(10)
    assert find_stragglers(views(job, **few, is_crowded={2: True}), 1.0) == {}
    slow = SimulatedJob(3, compute=2.0)  # five steps are longer than that
    slow.run(10)
    assert find_stragglers(views(slow, **few), 1.0) == {}


def test_too_few_steps_say_nothing():
    job = SimulatedJob(3)
    job.slow = {1: 1.0}
    job.run(2)
    assert find_stragglers(views(job), 1.0) == {}
    assert find_stragglers({}, 1.0) == {}


def test_being_last_by_chance_is_no_straggler():
    """In half of the jobs of two ranks one of them is the last in half of the steps and more."""
    for seed in range(20):
        job = SimulatedJob(2, seed=seed)
        job.run(WINDOW // 2)
        job.slow = {0: 0.03}  # large enough, but not for long
        job.run(WINDOW // 2)
        assert find_stragglers(views(job), 1.0) == {}


def test_noise_of_short_steps_is_no_straggler():
    job = SimulatedJob(3, compute=0.0005)
    job.slow = {1: 0.001}
    job.run(WINDOW)
    assert find_stragglers(views(job), 1.0) == {}


# -- what lasts ------------------------------------------------------------------------------

SLOW = Straggler("backward", "late in backward")


def said(verdicts: Verdicts, finding: Straggler | None, step: int, now: float) -> str | None:
    found = verdicts.settle({} if finding is None else {0: finding}, {0: step}, now, 1.0)
    return found[0].kind if 0 in found else None


def test_a_finding_must_last_for_some_steps_and_some_reports():
    verdicts = Verdicts()
    assert said(verdicts, SLOW, 100, 0.0) is None
    assert said(verdicts, SLOW, 100 + LASTING_STEPS, 2.5) is None, "not for three reports"
    assert said(verdicts, SLOW, 100 + LASTING_STEPS, 3.0) == "backward"
    assert said(verdicts, None, 120, 4.0) == "backward"
    assert said(verdicts, None, 120 + LASTING_STEPS - 1, 60.0) == "backward", "for too few steps"
    assert said(verdicts, SLOW, 130, 61.0) == "backward"
    assert said(verdicts, None, 131, 62.0) == "backward", "counted anew"
    assert said(verdicts, None, 131 + LASTING_STEPS, 65.0) is None


def test_facts_are_said_and_taken_back_at_once():
    verdicts = Verdicts()
    stopped, awaited = Straggler("stopped", "by a signal"), Straggler("awaited", "late")
    assert said(verdicts, stopped, 5, 0.0) == "stopped"
    # It goes on, and the others have not reported yet that they do.
    assert said(verdicts, awaited, 5, 0.5) is None
    assert said(verdicts, None, 5, 1.0) is None
    assert said(verdicts, awaited, 6, 2.0) is None
    assert said(verdicts, awaited, 6, 3.0) == "awaited"
    assert said(verdicts, None, 6, 3.5) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "backward", "compute", "stopped", "awaited"]),
            st.integers(0, 20),
            st.floats(0, 5),
        ),
        max_size=60,
    )
)
def test_what_is_said_does_not_change_back_and_forth(moments: list[tuple[str | None, int, float]]):
    """Between two changes of what is judged there are the steps and the time that it must last."""
    verdicts, step, now, before, changed = Verdicts(), 0, 0.0, None, (-LASTING_STEPS, -3.0)
    for kind, steps, seconds in moments:
        step, now = step + steps, now + seconds
        after = said(verdicts, Straggler(kind, "") if kind else None, step, now)
        assert after in (kind, before) or (after is None and before in ("stopped", "awaited"))
        if after != before and not {after, before} & {"stopped", "awaited"}:
            assert step - changed[0] >= LASTING_STEPS
            assert now - changed[1] >= 3.0
        if after != before:
            changed = (step, now) if after in ("backward", "compute", None) else changed
            if {after, before} & {"stopped", "awaited"}:
                changed = (-(10**9), -(10.0**9))
        before = after


# -- whole jobs ------------------------------------------------------------------------------


def train(board: Board, job: SimulatedJob, steps: int) -> None:
    job.run(steps)
    for rank in range(job.size):
        board.take_report(parse_report(0, rank, job.encoded(rank)), job.now)
    board.update(job.now)


@settings(max_examples=examples(8), deadline=None)
@given(st.integers(0, 10**6))
def test_16_noisy_ranks_on_2_cores_give_one_banner_and_no_marks(seed: int):
    job = SimulatedJob(16, per_host=16, compute=0.01, seed=seed, cores=2)
    board = Board("train.py", START, 1.0)
    board.take_decision(0, job.places(), START)
    for _ in range(60):
        train(board, job, 8)
        assert board.changes()["job"]["crowded"] == "16 ranks share 2 cores"
        assert {rank.state for rank in board.ranks.values()} == {"training"}
    assert board.events.number == 0


@settings(max_examples=examples(8), deadline=None)
@given(
    st.integers(2, 12),
    st.integers(0, 10**6),
    st.sampled_from(["slow", "slow_input", "slow_link"]),
    st.floats(0.5, 20),
)
def test_a_rank_that_is_slow_is_named_in_time_and_alone(
    size: int, seed: int, how: str, factor: float
):
    job = SimulatedJob(size, per_host=1, seed=seed)
    board = Board("train.py", START, 0.01)
    board.take_decision(0, job.places(), START)
    for _ in range(WINDOW):
        train(board, job, 1)
    rank = seed % size
    setattr(job, how, {rank: factor * job.compute})
    for _ in range(MOST_STEPS_UNTIL_NAMED):
        train(board, job, 1)
    findings = {number: each.finding for number, each in board.ranks.items() if each.finding}
    assert list(findings) == [rank]
    kind = {"slow": "backward", "slow_input": "compute", "slow_link": "link"}[how]
    assert findings[rank].kind == kind
    setattr(job, how, {})
    for _ in range(MOST_STEPS_UNTIL_NAMED):
        train(board, job, 1)
    assert board.ranks[rank].finding is None
    assert [event["kind"] for event in board.events.since(0)] == ["slow", "well"]


def test_a_rank_that_is_really_slow_is_named_on_a_crowded_host_too():
    job = SimulatedJob(16, per_host=16, compute=0.01, cores=2)
    board = Board("train.py", START, 1.0)
    board.take_decision(0, job.places(), START)
    job.slow = {3: 0.2}
    for _ in range(10):
        train(board, job, 8)
    assert [number for number, rank in board.ranks.items() if rank.finding] == [3]


def test_the_median_of_a_rank_is_what_is_told():
    job = SimulatedJob(2, per_host=1)
    board = Board("train.py", START, 1.0)
    board.take_decision(0, job.places(), START)
    train(board, job, 10)
    job.slow_input = {1: 5.0}
    train(board, job, 1)
    job.slow_input = {}
    train(board, job, 5)
    for rank in board.changes()["ranks"]:
        assert 0.045 < rank["split"][0] < 0.055
        assert rank["why"] == ""


def test_a_step_of_any_kind_adds_up():
    step = ReportedStep(1, START, 1.0, 0.4, 0.3, 0.5, 0.1)
    assert step.compute + step.wait + step.exposed == pytest.approx(step.total)
