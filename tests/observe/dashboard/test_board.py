"""The model of the page, fed by simulated ranks."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from horovod.observe.dashboard import board as board_module
from horovod.observe.dashboard import series
from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.reports import Report, ReportedStep, parse_report
from tests.observe.dashboard.simulated import START, SimulatedJob


class Page:
    """Puts changes together as page.js does."""

    def __init__(self) -> None:
        self.version = self.event = 0
        self.ranks: dict[int, dict[str, Any]] = {}
        self.job: dict[str, Any] = {}
        self.stalls: list[Any] = []
        self.rows: dict[float, list[float]] = {}
        self.metrics: dict[str, list[list[float]]] = {}
        self.events: list[dict[str, Any]] = []

    def ask(self, board: Board) -> int:
        news = json.loads(json.dumps(board.changes(self.version, self.event), allow_nan=False))
        self.version = news["version"]
        self.job = news.get("job", self.job)
        if news.get("everybody"):
            self.ranks = {}
        self.ranks |= {rank["rank"]: rank for rank in news.get("ranks", ())}
        self.stalls = news.get("stalls", self.stalls)
        if "steps" in news:
            if news["steps"]["reset"]:
                self.rows = {}
            self.rows |= {row[0]: row for row in news["steps"]["rows"]}
        for name, change in news.get("metrics", {}).items():
            before = [] if change["reset"] else self.metrics.get(name, [])
            self.metrics[name] = before + change["points"]
        for event in news.get("events", ()):
            self.events.append(event)
            self.event = event["number"]
        return len(json.dumps(news))


def report_all(board: Board, job: SimulatedJob, ranks=None, **changes: Any) -> None:
    for rank in range(job.size) if ranks is None else ranks:
        report = parse_report(job.generation, rank, job.encoded(rank, **changes))
        board.take_report(report, job.now)
    board.update(job.now)


def make(size: int, **how: Any) -> tuple[Board, SimulatedJob]:
    job = SimulatedJob(size, **how)
    board = Board("train.py", START, 1.0)
    board.take_decision(0, job.places(), START)
    return board, job


def test_ranks_start_and_train():
    board, job = make(4, per_host=2)
    board.update(START)
    page = Page()
    page.ask(board)
    assert [rank["state"] for rank in page.ranks.values()] == ["starting"] * 4
    assert page.ranks[3]["host"] == "node01"
    assert page.ranks[3]["local_rank"] == 1
    job.run(20)
    report_all(board, job)
    page.ask(board)
    assert [rank["state"] for rank in page.ranks.values()] == ["training"] * 4
    assert page.job["step"] == 20
    assert page.job["hosts"] == 2
    assert 15 < page.job["rate"] < 17
    compute, wait, reduce = page.ranks[0]["split"]
    assert 0.045 < compute < 0.055
    assert wait < 0.01
    assert 0.005 < reduce < 0.011


def test_only_what_changed_is_sent():
    board, job = make(64)
    job.run(20)
    report_all(board, job)
    page = Page()
    everything = page.ask(board)
    version = page.version
    board.update(job.now)
    assert board.version == version, "nothing happened"
    assert page.ask(board) < 100
    job.run(1)
    report_all(board, job, ranks=[7])
    assert page.ask(board) < everything / 10
    assert page.ranks[7]["step"] == 21
    assert page.ranks[8]["step"] == 20


def test_an_event_is_a_change():
    board, _ = make(2)
    board.update(START)
    version = board.version
    board.events.add("host", "something", START)
    board.update(START)
    assert board.version == version + 1
    assert [event["text"] for event in board.changes(version, 0)["events"]] == ["something"]


def test_a_page_that_knows_nothing_right_gets_everything():
    board, job = make(2)
    job.run(5)
    report_all(board, job)
    assert board.changes(0)["full"]
    assert board.changes(10**9)["full"]
    assert not board.changes(board.version)["full"]


def test_changes_add_up_to_everything():
    board, job = make(16)
    often, once = Page(), Page()
    for second in range(40):
        job.run(12)
        if second == 20:
            job.slow[3] = 0.05
        report_all(board, job)
        often.ask(board)
    once.ask(board)
    assert (often.ranks, often.rows, often.metrics) == (once.ranks, once.rows, once.metrics)
    assert (often.events, often.stalls, often.job) == (once.events, once.stalls, once.job)


def size_of(board: Board) -> int:
    """Of everything but the histories, whose rows are halved now and then."""
    return len(pickle.dumps({**vars(board), "histories": {}}))


def test_256_ranks_for_an_hour_in_bounded_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(series, "_MOST_BUCKETS_OF_RANK", 16)
    board, job = make(256, per_host=8, compute=0.4)
    page = Page()
    page.ask(board)
    largest = 0
    for turn in range(60):
        job.run(6)
        job.now += 60.0  # as if reports were rare
        job.slow = {200: 0.3} if turn > 30 else {}
        report_all(board, job)
        largest = max(largest, page.ask(board))
        if turn == 40:
            before = size_of(board)
    grown = size_of(board) - before
    assert job.now - START > 3600
    assert page.ranks[200]["state"] == "slow"
    assert "late in backward" in page.ranks[200]["why"]
    assert sum(rank["state"] != "training" for rank in page.ranks.values()) == 1
    assert len(page.rows) <= 480
    assert len(page.metrics["loss"]) <= 801
    assert largest < 300_000
    assert grown < 0.05 * before
    assert len(board.histories) == 256
    for history in board.histories.values():
        assert max(len(rows["rows"]) for rows in list(history.changes().values())) <= 16
    assert len(json.dumps(board.changes())) < 400_000


def test_charts_of_long_jobs_get_coarser_and_keep_their_means():
    board, job = make(2, compute=1.0)
    for _ in range(60):
        job.run(20)
        report_all(board, job)
    page = Page()
    page.ask(board)
    assert len(page.rows) <= 480
    assert board.steps.width > 1
    times = sorted(page.rows)
    assert times[-1] - times[0] > 1300
    for row in page.rows.values():
        assert 1.1 < row[1] < 1.3
        assert abs(row[1] - sum(row[2:5])) < 0.01


def test_the_longest_step_of_a_fast_job_is_a_peak_and_weighs_as_one():
    """A report has 50 of the 1001 steps: the longest of all, and the last ones."""
    steps = [ReportedStep(1, START, 5.0, 0.0, 0.0, 0.0, 0.0)]
    steps += [ReportedStep(n, START, 0.01, 0.0, 0.0, 0.0, 0.0) for n in range(953, 1002)]
    series_of_all, history = series.StepSeries(), series.RankHistory()
    series_of_all.add_steps(steps, 0.0, 1)
    report = Report(0, 0, 1, 0, "a", 1, START, "training", steps=tuple(steps))
    history.take(report, None, START, 1)
    expected = pytest.approx((5.0 + 1000 * 0.01) / 1001, rel=1e-4)
    for found in (series_of_all.changes(), history.changes()["steps"]):
        (row,) = found["rows"]
        assert row[1:3] == [expected, expected]
        assert row[5] == 5.0


def test_metrics_are_those_of_the_lowest_rank():
    board, job = make(3)
    job.run(3)
    report_all(board, job, ranks=[2], metrics={"accuracy": [[1, 0.5]]})
    page = Page()
    page.ask(board)
    assert page.metrics["accuracy"] == [[1, 0.5]]
    report_all(board, job, ranks=[1], metrics={"accuracy": [[1, 0.7]]})
    report_all(board, job, ranks=[2], metrics={"accuracy": [[2, 0.6]]})
    page.ask(board)
    assert page.metrics["accuracy"] == [[1, 0.7]]


def test_a_stall_names_who_waits_for_whom_and_where():
    board, job = make(3)
    job.run(5)
    report_all(board, job)
    waiting = {
        "since": job.now - 3,
        "tensors": ["grad.weight"],
        "missing_ranks": [1],
        "source": "train.py:12",
    }
    report_all(board, job, ranks=[0, 2], state="waiting", waiting=waiting)
    page = Page()
    page.ask(board)
    assert page.ranks[1]["reason"] == "", "a report later it may have gone on"
    assert board.awaited == {1: 3.0}
    board.update(job.now + 1)
    page.ask(board)
    (stall,) = page.stalls
    assert stall["ranks"] == [0, 2]
    assert stall["missing"] == [1]
    assert stall["tensors"] == ["grad.weight"]
    assert stall["sources"] == ["train.py:12"]
    assert abs(stall["since"] - (job.now - 3)) <= 1
    assert page.ranks[1]["reason"] == "awaited"
    assert page.ranks[0]["state"] == "waiting"
    assert "2 ranks have waited 4 s" in page.ranks[1]["why"]
    assert "stack" in page.ranks[1]["try"]
    job.run(5)
    report_all(board, job)
    page.ask(board)
    assert page.stalls == []
    assert page.ranks[1]["state"] == "training"


def test_a_slow_rank_that_ends_does_not_keep_up_again():
    board, job = make(3)
    job.slow = {1: 0.1}
    for _ in range(4):
        job.run(20)
        report_all(board, job)
    assert [event["kind"] for event in board.events.since(0)] == ["slow"]
    report_all(board, job, state="ended")
    assert board.ranks[1].finding is None
    assert board.events.number == 1


def test_a_stopped_process_and_its_recovery():
    board, job = make(3)
    job.run(5)
    report_all(board, job)
    board.ranks[1].process_state = "T"
    board.update(job.now + 1)
    page = Page()
    page.ask(board)
    assert page.ranks[1]["state"] == "stopped"
    board.ranks[1].process_state = "S"
    board.update(job.now + 2)
    page.ask(board)
    assert page.ranks[1]["state"] == "training"
    assert [event["kind"] for event in page.events] == ["slow", "well"]


def test_silence():
    board, job = make(3)
    job.run(5)
    report_all(board, job)
    board.update(job.now + 4)
    assert board.ranks[0].state == "training"
    board.update(job.now + 9)
    page = Page()
    page.ask(board)
    assert {rank["state"] for rank in page.ranks.values()} == {"silent"}


def test_a_host_that_goes_silent_is_one_event():
    board, job = make(32, per_host=8)
    job.run(5)
    report_all(board, job)
    job.run(200)
    report_all(board, job, ranks=range(8, 32))
    page = Page()
    page.ask(board)
    (event,) = page.events
    assert event["text"].startswith("8 ranks (0-7): no report for ")


def test_an_elastic_job_loses_a_rank_and_gets_another():
    board = Board("train.py", START, 1.0, elastic=True)
    workers = {"w0": ("a", 0), "w1": ("a", 1), "w2": ("b", 2)}
    for name in workers:
        board.started_worker(name, 100 + int(name[1:]))
    board.events.decision(1, workers, "3 workers: the job begins", START)
    board.take_decision(1, workers, START)
    board.events.formed(1, START + 2.5)
    job = SimulatedJob(3)
    job.generation = 1
    job.run(5)
    report_all(board, job)
    page = Page()
    page.ask(board)
    assert page.events[-1]["text"] == "formed with 3 workers in 2.5 s"
    assert page.ranks[2]["pid"] == 10_002

    now = job.now
    board.exited_worker("w1", -9)
    board.events.lost("w1", "a", "killed by SIGKILL", now)
    board.update(now)
    page.ask(board)
    assert page.ranks[1]["state"] == "failed"
    assert page.ranks[1]["code"] == -9
    after = {"w0": ("a", 0), "w2": ("b", 1), "w3": ("b", 2)}
    board.events.decision(2, after, "3 workers: w1 failed; w3 on b joins", now + 1)
    board.take_decision(2, after, now + 1)
    board.update(now + 1)
    page.ask(board)
    assert {rank: each["worker"] for rank, each in page.ranks.items()} == {
        0: "w0",
        1: "w2",
        2: "w3",
    }
    assert page.ranks[1]["pid"] == 102

    # What is left of the old generation does not disturb the new one.
    late = parse_report(1, 1, job.encoded(1))
    made = job.step
    board.take_report(late, now + 1.1)
    board.update(now + 1.1)
    assert board.ranks[1].state == "starting"
    board.events.formed(2, now + 3.2)
    # The survivors go on counting their steps; for the page, the newcomer counts with them.
    job.generation = 2
    job.steps_before, job.step = {0: made + 2, 1: made + 2}, 0
    job.run(5)
    report_all(board, job)
    page.ask(board)
    assert [rank["step"] for rank in page.ranks.values()] == [made + 7] * 3
    assert page.job["step"] == made + 7
    texts = [event["text"] for event in page.events]
    assert "rank 1 (w1) on a lost: killed by SIGKILL" in texts
    assert "w3 on b joins as rank 2" in texts
    assert "re-formed with 3 workers in 3.2 s" in texts
    assert page.job["generation"] == 2
    assert {rank["state"] for rank in page.ranks.values()} == {"training"}


def test_ranks_that_nobody_announced_place_themselves():
    board = Board("", START, 1.0)
    job = SimulatedJob(4, per_host=2)
    job.run(3)
    report_all(board, job, ranks=[2])
    assert [rank.state for rank in board.ranks.values()] == [
        "starting",
        "starting",
        "training",
        "starting",
    ]
    assert board.ranks[2].host == "node01"
    report_all(board, job, ranks=[0, 1, 3])
    assert [rank.host for rank in board.ranks.values()] == ["node00"] * 2 + ["node01"] * 2


def test_a_report_cannot_claim_a_huge_job():
    board = Board("", START, 1.0)
    job = SimulatedJob(1)
    job.run(3)
    report_all(board, job, size=2**30)
    assert len(board.ranks) == 4096


def test_only_those_who_failed_are_said_to_have_failed():
    board, job = make(4)
    job.run(5)
    report_all(board, job)
    board.exited_worker("1", -9)
    board.exited_worker("0", -15, "stopped by the launcher")
    board.exited_worker("2", 1)
    board.exited_worker("3", 0)
    board.update(job.now)
    assert [rank.state for rank in board.ranks.values()] == ["ended", "failed", "failed", "ended"]
    board.blame([1], "ended after rank 1 had failed")
    board.update(job.now)
    page = Page()
    page.ask(board)
    assert [rank["state"] for rank in page.ranks.values()] == ["ended", "failed", "ended", "ended"]
    assert [rank["why"] for rank in page.ranks.values()] == [
        "stopped by the launcher",
        "",
        "ended after rank 1 had failed",
        "",
    ]


def test_a_worker_that_was_given_up_has_failed_though_the_launcher_killed_it():
    board = Board("train.py", START, 1.0, elastic=True)
    board.take_decision(1, {"w0": ("a", 0), "w1": ("a", 1)}, START)
    board.mark_failed("w1")
    board.exited_worker("w1", -9, "stopped by the launcher")
    board.exited_worker("w0", -15, "stopped by the launcher")
    assert [rank.state for rank in board.ranks.values()] == ["ended", "failed"]


def test_the_history_of_a_rank_and_what_its_process_uses():
    board, job = make(2)
    for _ in range(5):
        job.run(20)
        report_all(board, job)
    board.take_stack("1", ["Thread 1", "    here (a.py:1)\x1b[31m"], job.now)
    page = Page()
    page.ask(board)
    assert page.ranks[1]["processor"] == 0.5
    found = board.rank_changes("1")
    assert found["stack"]["lines"] == ["Thread 1", "    here (a.py:1) [31m"]
    (first, *rest) = found["steps"]["rows"]
    assert len(first) == 6
    assert all(0.05 < row[1] <= row[5] < 0.08 for row in [first, *rest])
    assert {row[2] for row in found["use"]["rows"]} == {700_000_000.0}
    assert board.rank_changes("1", found["version"])["steps"] is None
    assert board.rank_changes("nobody") == {
        "version": board.version,
        "steps": None,
        "use": None,
        "stack": None,
    }


def test_histories_of_workers_that_are_gone_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(board_module, "_MOST_HISTORIES", 6)
    board = Board("train.py", START, 1.0, elastic=True)
    for number in range(1, 6):
        job = SimulatedJob(4)
        job.generation = number
        workers = {f"w{10 * number + rank}": ("a", rank) for rank in range(4)}
        board.take_decision(number, workers, START)
        job.run(3)
        report_all(board, job)
        assert set(workers) <= set(board.histories)
    assert list(board.histories) == ["w42", "w43", "w50", "w51", "w52", "w53"]


def test_the_end():
    board, job = make(2)
    job.run(5)
    report_all(board, job)
    board.exited_worker("1", -9)
    board.exited_worker("0", 1)
    board.end(137, "rank 1 on node00: killed by SIGKILL", "line\n<b>line</b>\n", job.now + 1)
    board.update(job.now + 100)
    page = Page()
    page.ask(board)
    assert page.job["ended"]["status"] == 137
    assert page.job["ended"]["account"] == ["line", "<b>line</b>"]
    assert page.ranks[1]["state"] == "failed"
    assert page.ranks[1]["why"] == ""


def test_clocks_of_other_hosts_do_not_matter():
    board, job = make(2)
    job.run(5)
    content = json.loads(job.encoded(1))
    content["time"] += 5000
    for step in content["steps"]:
        step[1] += 5000
    report = parse_report(0, 1, json.dumps(content).encode())
    board.take_report(report, job.now)
    board.update(job.now)
    page = Page()
    page.ask(board)
    assert all(START - 2 < start <= job.now for start in page.rows)
    assert page.ranks[1]["state"] == "training"
