"""Workers that hold the interpreter's lock for 10 s: slow with patient limits, lost with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horovod.common.generations.decisions import answer_key
from horovod.torch.elastic.checkpoint import newest_checkpoint
from tests.elastic.holding import hold_the_lock
from tests.elastic.job import ElasticJob
from tests.elastic.launched import Launched
from tests.elastic.training import Plan, expected, this_worker, train
from tests.ranks import tell

SECONDS = 10
HOLD = f"hold {SECONDS}"
LOCAL = ["-H", "localhost:3", "--min-np", "2", "--max-np", "3", "-np", "3"]


def test_with_the_default_limits_all_wait_and_nothing_is_lost(tmp_path: Path):
    plan = {"steps": 10, "silence": 200, "faults": {"w1": ["step", 5, HOLD]}}
    with Launched(tmp_path, LOCAL, plan) as job:
        job.check_success(size=3)
        assert job.sizes() == [3]
        assert job.output.count("begin at") == 3, "nobody went back"


def test_the_default_limits_allow_for_it_even_when_another_worker_is_lost(tmp_path: Path):
    """The others need its answer to meet again."""
    faults = {"w1": ["step", 5, HOLD], "w2": ["step", 5, "SIGKILL"]}
    with Launched(tmp_path, LOCAL, {"steps": 10, "size": 3, "faults": faults}) as job:
        job.check_success(size=3)
        assert [event["worker"] for event in job.events("failed")] == ["w2"]
        assert set(job.ends()) == {"w0", "w1", "w3"}


def test_with_shorter_limits_it_is_replaced(tmp_path: Path):
    # Not too short, though: the others have to answer on a busy machine.
    plan = {"steps": 30, "size": 3, "silence": 5, "faults": {"w0": ["step", 7, "hold 200"]}}
    env = {"HOROVOD_ELASTIC_ANSWER_TIMEOUT": "10"}
    with Launched(tmp_path, LOCAL, plan, env=env) as job:
        job.check_success(size=3)
        assert "w0 (rank 0, localhost) failed: did not react within 10 s" in job.errors
        assert set(job.ends()) == {"w1", "w2", "w3"}


def _hold_in_step_5(plan: Plan) -> dict[str, Any]:
    def hold(state: Any) -> None:
        if state.step == 5 and this_worker() == "w0":
            tell("holds")
            hold_the_lock(SECONDS)

    return train(plan, hold)


def test_who_wakes_up_too_late_ends_and_leaves_the_others_alone(tmp_path: Path):
    """Nobody kills it, as when the driver cannot reach its host. It was rank 0.

    It holds the lock while it probably still writes a checkpoint, and finds that the others have
    gone on when it commits: neither may be taken for the newest.
    """
    plan = Plan(steps=10, pause=8, checkpoint_dir=str(tmp_path))
    with ElasticJob(_hold_in_step_5, plan) as job:
        job.start(3)
        assert job.heard(0) == "holds"
        job.lose(0)
        assert [job.heard(1), job.heard(2)] == ["paused", "paused"]  # in a generation of their own
        (late,) = job.wait(ranks=[0])
        assert (late.result["ended"], late.exitcode) == ("exit 0", 0), late.describe()
        assert "it has no place in the job any more (lost w0)" in late.output
        assert job.store.keys(answer_key("seen", 2, "w0")) == [], "it did not even try to take part"
        assert _newest(tmp_path) == ("commit-3.pt", 6), "of the others"
        job.say_to([1, 2])
        for outcome in job.wait(ranks=[1, 2]):
            assert outcome.result["ended"] == "returned", outcome.describe()
            assert outcome.result["size"] == 2
            assert outcome.result["weights"] == pytest.approx(expected(10), abs=1e-6)
    assert _newest(tmp_path) == ("commit-5.pt", 10)


def _newest(folder: Path) -> tuple[str, int]:
    """The newest checkpoint's name, and the step it is of."""
    found = newest_checkpoint(folder)
    assert found is not None
    return found[0].name, found[1]["attributes"]["step"]
