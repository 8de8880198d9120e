"""Fixed seeds of the simulated cluster, and that it repeats and finds mistakes.

`make simulate` runs as many seeds as you like; `make simulate-mutants` tries all mutants.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("greenlet")

from tests.simulation.job import Fault, Plan, Result, shortest, simulate
from tests.simulation.mutants import MUTANTS

ROOT = Path(__file__).parents[2]

FOUND = {
    46: "a link that is cut in one direction ended the job: its workers' exit looked like an error",
    97: "a worker that was lost with its host before it ran counted as one that cannot be started",
}
"""Seeds that have once broken a promise, with what was wrong."""

CALM = Plan(1, 2, 1, 1, steps=6, pace=0.5, commit_every=2, faults=())


@pytest.mark.parametrize("seed", [*range(6), *FOUND])
def test_promises_are_kept(seed: int):
    result = simulate(Plan.from_seed(seed))
    assert not result.problem, result.story()


def test_a_job_without_faults():
    result = simulate(CALM)
    assert (result.problem, result.status, result.generations) == ("", 0, 1), result.story()


def test_the_same_seed_gives_the_same_events():
    program = (
        "from tests.simulation.job import Plan, simulate\n"
        "print(simulate(Plan.from_seed(3)).fingerprint())"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert found[0] == found[1]


def test_a_mistake_is_found_and_its_story_is_short():
    (mutant,) = [each for each in MUTANTS if "takes no snapshot" in each.name]
    kill = Fault("kill worker", 5.0, 0.0, 1)
    noise = (Fault("clock jumps", 3.0, 1.0, 0), Fault("clock jumps", 4.0, 1.0, 1))
    plan = replace(CALM, steps=40, pace=0.3, commit_every=3, faults=(*noise, kill))
    assert not simulate(plan).problem
    result = shortest(plan, mutant.patches)
    assert result.plan.faults == (kill,)
    assert "kill worker" in result.story()


def test_other_events_have_another_fingerprint():
    one, other = Result(CALM, events=[(1.0, "a")]), Result(CALM, events=[(1.0, "b")])
    assert one.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("seeds", ["x", "-3", "1-", "1.5"])
def test_a_seed_that_is_no_number(seeds: str):
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", f"--seeds={seeds}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "is neither a number nor a range such as 0-999" in done.stderr
