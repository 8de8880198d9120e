"""Fixed jobs of the simulated cluster, and that it repeats and finds mistakes.

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

from tests.simulation.coverage import Coverage
from tests.simulation.job import shortest, simulate
from tests.simulation.modules import parse
from tests.simulation.mutants import MUTANTS
from tests.simulation.plan import EVERYWHERE, Fault, Plan, Result

ROOT = Path(__file__).parents[2]

CALM = Plan(1, 2, 1, 1, samples=12, pace=0.5, commit_every=2, faults=())
BUSY = replace(CALM, slots=2, samples=25, epochs=2, batch=2, uses_sets=True, uses_join=True)

FOUND = {
    "a worker that was lost before it ran counts as one that cannot be started": Plan(
        97,
        1,
        1,
        1,
        samples=49,
        pace=2.0,
        commit_every=1,
        faults=(
            Fault("power loss", 15.754167640882798, 28.875282512224505, 861),
            Fault("cut from the launcher", 60.57169148380964, 71.19369046919297, 992),
            Fault("cut", 113.66557457674152, 0.548431269225645, 847),
        ),
    ),
    "workers of a decision that never formed count as having the state": Plan(
        3,
        3,
        1,
        1,
        samples=60,
        pace=2.0,
        commit_every=2,
        faults=(
            Fault("slow network", 10.0, 300.0, 0),
            Fault("slow network", 10.0, 300.0, 1),
            Fault("discovery lies", 12.0, 100.0, 0),
        ),
        batch=2,
    ),
    "every decision gives workers whose program hangs more time": Plan(
        5,
        3,
        1,
        1,
        samples=20,
        pace=2.0,
        commit_every=2,
        faults=(Fault("worker's program hangs", 8.0, 0.0, 1),),
        elastic_timeout=60.0,
        stall_shutdown=61.0,
    ),
    "process sets are made in generations that are too small for them": Plan(
        1,
        3,
        1,
        1,
        samples=40,
        pace=1.0,
        commit_every=2,
        faults=(Fault("power loss", 10.0, 90.0, 1), Fault("power loss", 10.0, 90.0, 2)),
        uses_sets=True,
    ),
    "a worker that never reached the driver ends as if its script had failed": Plan(
        147,
        1,
        1,
        1,
        samples=12,
        pace=0.5,
        commit_every=2,
        faults=(Fault("cut from the launcher", 0.1, 12.0, 0),),
    ),
    "a checkpoint gets its name before its content is on disk": Plan(
        1,
        2,
        1,
        1,
        samples=30,
        pace=0.5,
        commit_every=2,
        faults=(Fault(EVERYWHERE, 3.0, 10.0, 1),),
        uses_disk=True,
    ),
}
"""Jobs that have once broken a promise, by the mutant that has the mistake again, or once would.

They find it with any order of threads, so that other changes of the code do not hide it.
"""


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_promises_are_kept(seed: int):
    result = simulate(Plan.from_seed(seed))
    assert not result.problem, result.story()


def test_workers_that_come_too_late_for_their_slot_end():
    plan = FOUND["workers of a decision that never formed count as having the state"]
    result = simulate(replace(plan, seed=2))
    assert not result.problem, result.story()


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(name: str):
    (mutant,) = [each for each in MUTANTS if each.name == name]
    result = simulate(FOUND[name])
    assert not result.problem, result.story()
    assert simulate(FOUND[name], mutant.patches).problem


def test_hosts_that_are_lost_after_training_fail_the_job_and_are_named():
    plan = replace(CALM, num_hosts=1, slots=2, faults=(Fault("slow network", 0.0, 600.0, 0),))
    done = [when for when, what in simulate(plan).events if "horovodrun: done" in what]
    loss = Fault("power loss", max(done) - 1000.0 + 0.01, 5.0, 0)  # before their exits arrive
    result = simulate(replace(plan, faults=(*plan.faults, loss)))
    assert not result.problem, result.story()
    assert result.status == 137
    assert "had finished training, and then failed: lost with its host" in result.ending


@pytest.mark.parametrize("plan", [CALM, BUSY])
def test_a_job_without_faults(plan: Plan):
    result = simulate(plan)
    assert (result.problem, result.status, result.generations) == ("", 0, 1), result.story()
    assert result.decisions == ["start"]


def test_the_same_seed_gives_the_same_events():
    program = (
        "from tests.simulation.job import simulate\n"
        "from tests.simulation.plan import Plan\n"
        "print(simulate(Plan.from_seed(4)).fingerprint())"
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
    plan = replace(CALM, samples=80, pace=0.3, commit_every=3, faults=(*noise, kill))
    assert not simulate(plan).problem
    result = shortest(plan, mutant.patches)
    assert result.plan.faults == (kill,)
    assert "kill worker" in result.story()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_can_be_made(mutant):
    """A change of the code must not leave a mutant behind that nobody can try."""
    parse(mutant.module, mutant.patches[mutant.module])


def test_other_events_have_another_fingerprint():
    one, other = Result(CALM, events=[(1.0, "a")]), Result(CALM, events=[(1.0, "b")])
    assert one.fingerprint() != other.fingerprint()


def test_the_report_counts_faults_by_phase_and_pairs():
    faults = (Fault("cut", 1.0, 9.0, 0), Fault("kill worker", 5.0, 0.0, 1))
    coverage = Coverage()
    coverage.add(Result(replace(CALM, faults=faults), moments=[("training", "cut")], status=0))
    lines = list(coverage.report(1.0))
    assert "1 jobs" in lines[0]
    (row,) = [line.split() for line in lines if line.startswith("  cut  ")]
    assert row == ["cut", "-", "-", "1", "-", "-"]
    assert any("pairs of faults within 60 s: 1 of" in line for line in lines)


def test_a_seed_that_is_no_number():
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seeds=1.5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "is neither a number nor a range such as 0-999" in done.stderr
