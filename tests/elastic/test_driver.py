"""The driver: real ``horovodrun``, real workers without torch, faults where the plan says."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks
from tests.elastic.launched import Launched

PAGE = Path(__file__).parents[2] / "docs" / "elastic.md"
LOCAL = ["-H", "localhost:3", "--min-np", "2", "--max-np", "3", "-np", "3"]
PATIENT = {"HOROVOD_ELASTIC_ANSWER_TIMEOUT": "10"}  # seconds, for all on a busy machine


def missing(events: list[dict[str, Any]], folder: Path) -> list[str]:
    """For whom the job waits, by what docs/elastic.md says to run meanwhile."""
    (code,) = [code for code, _ in blocks(PAGE, "python") if "status.jsonl" in code]
    (folder / "status.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_without_faults(tmp_path: Path):
    with Launched(tmp_path, LOCAL, {"steps": 10}) as job:
        job.check_success(size=3)
        assert job.sizes() == [3]
        assert job.errors == "horovodrun: 3 workers: the job begins\n"


def test_with_verbose_twice_every_event_is_told(tmp_path: Path):
    with Launched(tmp_path, [*LOCAL, "--verbose", "--verbose"], {"steps": 3}) as job:
        job.check_success(size=3)
        assert "horovodrun: event: ready: worker w1, host localhost\n" in job.errors
        assert "horovodrun: event: formed: decision 1\n" in job.errors
        told = [line for line in job.errors.splitlines() if "the job begins" in line]
        assert told == ["horovodrun: 3 workers: the job begins"], "not as an event as well"


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("init", "raise"),
        ("meet", "SIGKILL"),
        ("sync", "raise"),
        ("step", "SIGKILL"),
        ("commit", "SIGKILL"),
    ],
)
def test_one_is_lost_and_replaced(tmp_path: Path, phase: str, how: str):
    plan = {"steps": 30, "size": 3, "faults": {"w1": [phase, 1, how]}}
    with Launched(tmp_path, LOCAL, plan) as job:
        job.check_success(size=3)
        assert set(job.ends()) == {"w0", "w2", "w3"}
        assert job.ends()["w0"][2] == 0, "the oldest survivor is rank 0"


def test_rank_0_is_lost(tmp_path: Path):
    plan = {"steps": 30, "size": 3, "faults": {"w0": ["step", 7, "SIGSEGV"]}}
    with Launched(tmp_path, LOCAL, plan) as job:
        job.check_success(size=3)
        assert {worker: rank for worker, (_, _, rank, _) in job.ends().items()} == {
            "w1": 0,
            "w2": 1,
            "w3": 2,
        }
        begun = re.findall(r"begin at \d+ worker (w\d) .*local rank (\d)", job.output)
        ended = re.findall(r"end \d+ .*worker (w\d) .*local rank (\d)", job.output)
        assert dict(ended) == {"w1": "1", "w2": "2", "w3": "0"}, "w3 has the slot of w0"
        assert set(ended) <= set(begun), "each has the local rank that it had before"
        assert dict(reversed(begun)).items() >= dict(ended).items(), "which is its first"
        assert "w0 (rank 0, localhost) failed: killed by SIGSEGV" in job.errors
        told = re.findall(
            r"^horovodrun: re-formed with (\d) ranks? in \d+\.\d s$", job.errors, re.M
        )
        formed = job.events("formed")
        assert "seconds" not in formed[0], "the first time is no change"
        assert told == [str(event["ranks"]) for event in formed if "seconds" in event]
        assert told[-1] == "3"


def test_two_are_lost_at_once(tmp_path: Path):
    faults = {"w0": ["step", 7, "SIGKILL"], "w2": ["step", 7, "SIGKILL"]}
    options = ["-H", "localhost:4", "--min-np", "2", "-np", "4"]
    with Launched(tmp_path, options, {"steps": 30, "size": 4, "faults": faults}) as job:
        job.check_success(size=4)


def test_another_is_lost_during_the_recovery(tmp_path: Path):
    faults = {"w0": ["step", 7, "SIGKILL"], "w1": ["meet", 2, "SIGKILL"]}
    options = ["-H", "localhost:3", "--min-np", "1", "-np", "3"]
    with Launched(tmp_path, options, {"steps": 30, "size": 3, "faults": faults}) as job:
        job.check_success(size=3)


def test_too_few_survivors_wait_for_a_replacement(tmp_path: Path):
    plan = {"steps": 20, "faults": {"w1": ["step", 7, "SIGKILL"]}}
    with Launched(tmp_path, ["-H", "localhost:2", "--min-np", "2"], plan) as job:
        job.check_success(size=2)
        assert job.sizes() == [2, 1, 2]
        assert "1 worker, too few to go on (at least 2)" in job.errors
        assert [e["decision"] for e in job.events("formed")] == [1, 3], "w0 did not go on alone"
        assert [e["too_few"] for e in job.events("decision")] == [False, True, False]
        (late,) = [e for e in job.events("ready") if e["worker"] == "w2"]
        before = list(itertools.takewhile(lambda e: e != late, job.events()))
        new = f"w2 (pid {job.pids()['w2']} on localhost) has not called hvd.init()"
    assert missing(before, tmp_path) == [new], "the survivor is not to blame"


def test_all_are_lost(tmp_path: Path):
    """Nobody has the state any more, so training begins again."""
    faults = {"w0": ["step", 7, "SIGKILL"], "w1": ["step", 7, "SIGKILL"]}
    with Launched(tmp_path, ["-H", "localhost:2", "--min-np", "2"], {"faults": faults}) as job:
        job.check_success(size=2)
        assert set(job.ends()) == {"w2", "w3"}


def test_a_stopped_worker_is_given_up(tmp_path: Path):
    plan = {"steps": 30, "size": 3, "silence": 5, "faults": {"w1": ["step", 7, "SIGSTOP"]}}
    with Launched(tmp_path, LOCAL, plan, env=PATIENT) as job:
        job.check_success(size=3)
        assert "w1 (rank 1, localhost) failed: did not react within 10 s" in job.errors
        before = list(itertools.takewhile(lambda e: e["event"] != "failed", job.events()))
    called = [event["number"] for event in before if event["event"] == "decision"]
    heard = {e["worker"] for e in before if e["event"] == "heard" and e["decision"] == called[-1]}
    assert "w1" not in heard
    stopped = f"w1 (rank 1 on localhost) has not come to decision {called[-1]}"
    assert stopped in missing(before, tmp_path)


@pytest.mark.parametrize("how", ["slow 8", "hold 8"])
def test_a_slow_worker_is_waited_for(tmp_path: Path, how: str):
    plan = {"steps": 10, "silence": 5, "faults": {"w1": ["step", 5, how]}}
    begun = time.monotonic()
    with Launched(tmp_path, LOCAL, plan, env=PATIENT) as job:
        job.check_success(size=3)
        assert not job.events("failed")
        took = [event["seconds"] for event in job.events("formed") if "seconds" in event]
        assert sum(took) <= time.monotonic() - begun, "also where they met again by themselves"


def test_the_status_file_has_what_workers_answered(tmp_path: Path):
    plan = {"steps": 30, "size": 3, "faults": {"w1": ["step", 7, "SIGKILL"]}}
    with Launched(tmp_path, LOCAL, plan) as job:
        job.check_success(size=3)

        def who(event: str, **details: int) -> set[str]:
            return {e["worker"] for e in job.events(event) if details.items() <= e.items()}

        places = {event["number"]: set(event["workers"]) for event in job.events("decision")}
        formed = [event["decision"] for event in job.events("formed")]
        assert formed[0] == 1
        for number in formed:
            assert who("entered", decision=number) == places[number]
        survivors = {"w0", "w2"}
        assert who("heard", decision=2) == who("broken", decision=1) == survivors
        why = [event["why"] for event in job.events("broken") if event["decision"] == 1]
        assert all("w1 (rank 1, localhost) failed: killed by SIGKILL" in text for text in why)
        assert who("done") == {*survivors, "w3"}
        assert not job.events("leaving")


def test_who_ends_early_has_finished_and_the_others_go_on(tmp_path: Path):
    plan = {"steps": 20, "silence": 5, "faults": {"w1": ["step", 7, "exit 0"]}}
    with Launched(tmp_path, LOCAL, plan) as job:
        job.check_success(size=2)
        assert set(job.ends()) == {"w0", "w2"}


def test_one_dies_while_another_has_finished(tmp_path: Path):
    """Who is done takes no part in the new generation, so nobody may wait for it."""
    faults = {
        "w0": ["end", 1, "slow 3"],
        "w1": ["end", 1, "SIGKILL"],
        "w2": ["last", 1, "slow 3"],
    }
    with Launched(tmp_path, LOCAL, {"steps": 10, "silence": 5, "faults": faults}) as job:
        assert job.wait() == 137, str(job)  # w1 was done with training, but not with its work
        assert set(job.ends()) == {"w0", "w2"}
        assert job.events("started")[-1]["worker"] == "w2", "it is not replaced"


def test_sigterm_is_a_leave(tmp_path: Path):
    with Launched(tmp_path, LOCAL, {"steps": 40, "size": 2, "pace": 0.02}) as job:
        job.await_output("begin at 0 worker w1")
        job.kill("w1", signal.SIGTERM)
        job.check_success(size=2)
        assert job.sizes() == [3, 2], "it is not replaced"
        assert not job.events("failed")
        assert [event["worker"] for event in job.events("leaving")] == ["w1"]


def test_an_error_of_all_workers_ends_the_job(tmp_path: Path):
    faults = {f"w{n}": ["step", 3, "raise"] for n in range(20)}
    with Launched(tmp_path, LOCAL, {"faults": faults}) as job:
        assert job.wait() == 1, str(job)
        assert "RuntimeError: an error of w" in job.errors
        assert "The first to fail was" in job.errors
        job.check_nothing_left()


@pytest.mark.parametrize("how", ["raise", "SIGSEGV"])
def test_a_program_that_cannot_begin_ends_the_job(tmp_path: Path, how: str):
    faults = {f"w{n}": ["init", 1, how] for n in range(20)}
    with Launched(tmp_path, [*LOCAL, "--max-worker-failures", "100"], {"faults": faults}) as job:
        assert job.wait() == (1 if how == "raise" else 139), str(job)
        assert len(job.events("started")) <= 6, str(job)


def test_a_command_that_does_not_exist(tmp_path: Path):
    with Launched(tmp_path, LOCAL, program=["-c", "import no_such_module"]) as job:
        assert job.wait() == 1
        assert "No module named 'no_such_module'" in job.errors


def test_a_host_that_fails_too_often_gets_no_more_workers(tmp_path: Path):
    faults = {f"w{n}": ["step", 3 + n, "SIGKILL"] for n in range(1, 20)}
    options = ["-H", "localhost:2", "--min-np", "2", "--max-worker-failures", "2"]
    with Launched(tmp_path, options, {"steps": 1000, "faults": faults}) as job:
        assert job.wait() == 137, str(job)
        assert "localhost gets no new workers after 2 failures" in job.errors
        assert "every host has failed too often" in job.errors
        job.check_nothing_left()


def test_a_blacklisted_host_comes_back(tmp_path: Path):
    plan = {"steps": 20, "faults": {"w1": ["step", 3, "SIGKILL"]}}
    options = ["-H", "localhost:2", "--min-np", "2", "--max-worker-failures", "1"]
    with Launched(tmp_path, [*options, "--blacklist-cooldown-range", "1", "2"], plan) as job:
        job.check_success(size=2)
        assert "localhost gets no new workers after 1 failure, for a while" in job.errors


def test_the_reset_limit(tmp_path: Path):
    plan = {"steps": 1000, "faults": {"w1": ["step", 3, "SIGKILL"]}}
    with Launched(tmp_path, [*LOCAL, "--reset-limit", "0"], plan) as job:
        assert job.wait() == 137, str(job)
        assert "number of resets during elastic job exceeded limit: 0" in job.errors


def test_the_elastic_timeout(tmp_path: Path):
    plan = {"steps": 1000, "faults": {"w1": ["step", 3, "SIGKILL"]}}
    options = ["-H", "localhost:2", "--min-np", "2", "--max-worker-failures", "1"]
    options += ["--blacklist-cooldown-range", "3600", "3600", "--elastic-timeout", "20"]
    with Launched(tmp_path, options, plan) as job:
        assert job.wait() == 137, str(job)
        assert "gave up after 20 s (--elastic-timeout): the job needs 2 workers" in job.errors
        assert "not used after failures: localhost" in job.errors


def test_ctrl_c_lets_workers_leave(tmp_path: Path):
    with Launched(tmp_path, LOCAL, {"steps": 100000, "pace": 0.02}) as job:
        for worker in ("w0", "w1", "w2"):
            job.await_output(f"begin at 0 worker {worker}")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, str(job)
        assert not job.events("failed")
        assert job.errors.count("leaves the job, as it was told to") == 3
        job.check_nothing_left()


def test_ctrl_c_while_workers_wait_for_others(tmp_path: Path):
    plan = {"steps": 1000, "faults": {"w1": ["step", 3, "SIGKILL"]}}
    options = ["-H", "localhost:2", "--min-np", "2", "--max-worker-failures", "1"]
    options += ["--blacklist-cooldown-range", "3600", "3600"]
    with Launched(tmp_path, options, plan) as job:
        job.await_event("waiting")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, str(job)
        assert "w0 ends: it has no place in the job any more (the job ends)" in job.errors
        job.check_nothing_left()


def test_a_killed_driver_takes_everything_along(tmp_path: Path):
    with Launched(tmp_path, LOCAL, {"steps": 100000}) as job:
        job.await_event("formed")
        job.process.kill()
        job.process.wait()
        job.await_nothing_left()


BEGINS_LATER = """
import os, runpy, sys, time
place = [os.environ.get(f"HOROVOD_{name}") for name in
         ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
print(os.environ["HOROVOD_WORKER_ID"], "expects", *place, flush=True)
folder, late = sys.argv[1:]
if os.environ["HOROVOD_WORKER_ID"] == "w0":
    sys.exit(0)
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.02)
if late == "init":
    sys.argv[1:] = ['{"steps": 5}']
    runpy.run_module("tests.elastic.light_worker", run_name="__main__")
print(os.environ["HOROVOD_WORKER_ID"], "has ended well", flush=True)
"""


@pytest.mark.parametrize("late", ["init", "nothing"])
def test_who_ends_before_the_others_call_init_does_not_end_them(tmp_path: Path, late: str):
    options = ["-H", "localhost:2,127.0.0.1:1", "--min-np", "3", "-np", "3"]
    program = ["-c", BEGINS_LATER, str(tmp_path), late]
    with Launched(tmp_path, options, program=program) as job:
        job.await_event("exited", worker="w0", code=0)
        job.await_event("started", worker="w2")
        (tmp_path / "go").touch()
        assert job.wait() == 0, str(job)
        # Which host is ready first, and so has the first worker, depends on the machine.
        said = [line for line in job.output.splitlines() if "expects" in line]
        assert {re.sub(":w[012] ", ":", line) for line in said} == {
            "[0]<stdout>:expects 0 3 0 2 0 2",
            "[1]<stdout>:expects 1 3 1 2 0 1",
            "[2]<stdout>:expects 2 3 0 1 1 2",
        }
        assert sorted(e["worker"] for e in job.events("started")) == ["w0", "w1", "w2"], str(job)
        if late == "init":
            assert {worker: (rank, size) for worker, (_, _, rank, size) in job.ends().items()} == {
                "w1": (0, 2),
                "w2": (1, 2),
            }
        for worker in ("w1", "w2"):
            assert f"{worker} has ended well" in job.output
