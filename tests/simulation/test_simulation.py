"""Fixed jobs of the simulated cluster, and that it repeats and finds mistakes.

`make simulate` runs as many seeds as you like; `make simulate-mutants` tries all mutants.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("greenlet")

from tests.simulation.coverage import Coverage
from tests.simulation.job import shortest, simulate
from tests.simulation.modules import parse
from tests.simulation.moments import CALM, MOMENTS
from tests.simulation.mutants import MUTANTS
from tests.simulation.plan import (
    EVERYWHERE,
    HAND_OVER,
    STOP_WHEN_READY,
    Fault,
    Plan,
    Result,
)

ROOT = Path(__file__).parents[2]

BUSY = replace(CALM, slots=2, samples=25, epochs=2, batch=2, uses_sets=True, uses_join=True)

CUT_OFF = Plan.from_seed(960)
CUT_OFF = replace(CUT_OFF, faults=tuple(CUT_OFF.faults[index] for index in (1, 3, 5, 7)))
LATE_COMMIT = replace(CALM, seed=0, num_hosts=1, pace=5.0)
"""A worker alone, which commits for the first time more than ten seconds after the start."""

HANGING = Plan(
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
)

MANY_DECISIONS = Plan(
    5,
    3,
    1,
    1,
    samples=90,
    pace=2.0,
    commit_every=2,
    batch=2,
    faults=(
        *(Fault("slow network", 4.0, 300.0, number) for number in range(3)),
        Fault("discovery lies", 6.0, 100.0, 0),
        *(Fault("kill worker", 8.0 + 4 * number, 0.0, number) for number in range(12)),
    ),
)

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
            Fault("cut from the launcher", 19.0, 70.0, 0),
            Fault("kill worker", 20.0, 0.0, 0),  # the next one's start does not arrive
        ),
    ),
    "workers of a decision that never formed count as having the state": Plan(
        7,
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
    "those who have the state leave before others have it": Plan(
        0,
        2,
        1,
        1,
        samples=60,
        pace=2.0,
        commit_every=10,
        faults=(
            Fault("host is not offered", 6.0, 22.0, 1),  # its next worker joins after a commit
            Fault("host is not offered", 36.0, 60.0, 0),  # and the other is to leave before one
        ),
    ),
    "workers that lost their slot before they learned of it wait for ever": Plan(
        0,
        3,
        1,
        1,
        samples=90,
        pace=2.0,
        commit_every=2,
        elastic_timeout=60.0,
        faults=(
            Fault("host is not offered", 10.0, 10.0, 2),
            Fault(STOP_WHEN_READY, 19.0, 12.0, 0),  # the next worker of that host
            Fault("host is not offered", 27.0, 60.0, 2),  # after it has joined
            Fault("kill worker", 45.0, 0.0, 0),  # a decision of which it hears
        ),
    ),
    "a worker is given up because of a decision from before it joined": Plan(
        0,
        2,
        1,
        1,
        samples=60,
        pace=2.0,
        commit_every=2,
        faults=(
            Fault("kill worker", 20.0, 0.0, 1),
            Fault(STOP_WHEN_READY, 20.0, 20.0, 0),
        ),
    ),
    "two broken connections within one wait count as the loss of the driver": replace(
        CALM,
        seed=0,
        samples=60,
        faults=(
            Fault("connections break", 6.0, 0.0, 0),
            Fault("connections break", 9.0, 0.0, 0),
        ),
    ),
    "a worker that leaves out of the driver's reach seems to have trained to the end": replace(
        LATE_COMMIT,
        faults=(
            Fault("cut from the store", 7.0, 90.0, 0),
            Fault("tell worker to leave", 8.0, 0.0, 0),
        ),
    ),
    "a request fails because its connection broke while it was idle": replace(
        LATE_COMMIT,
        faults=(
            Fault("tell worker to leave", 8.0, 0.0, 0),
            Fault("connections break", 8.1, 0.0, 0),
        ),
    ),
    "nobody says that a worker is lost which the newest decision has left out": replace(
        CALM,
        seed=0,
        num_hosts=3,
        samples=90,
        faults=(
            Fault("power loss", 8.0, 90.0, 0),
            Fault("host is not offered", 8.1, 60.0, 0),  # before the launcher knows that it is lost
        ),
    ),
    "every decision gives workers whose program hangs more time": HANGING,
    "rank 0 gives its state to all, whoever has the newest": replace(
        CALM,
        seed=14,
        num_hosts=3,
        samples=120,
        faults=(
            Fault("kill worker", 6.02, 0.0, 1),
            Fault("kill worker", 5.97, 0.0, 1),
            Fault(HAND_OVER, 6.09, 10.0, 0),
        ),
    ),
    "a worker that was told to leave counts as failed": replace(
        CALM,
        seed=0,
        samples=60,
        faults=(
            Fault("kill worker", 6.0, 0.0, 1),
            Fault("tell all workers to leave", 6.05, 0.0, 0),
        ),
    ),
    "the store does not wake its thread for a key that the launcher sets": replace(
        CALM,
        seed=0,
        num_hosts=3,
        samples=90,
        faults=(Fault("host is not offered", 6.0, 90.0, 2),),
    ),
    "a broken connection to the store is used again": replace(
        CALM, seed=0, samples=60, faults=(Fault("connections break", 6.0, 0.0, 0),)
    ),
    "a generation that broke is entered again": replace(
        CALM, seed=0, samples=60, faults=(Fault("connections break", 6.0, 0.0, 0),)
    ),
    "who has left says nothing to those who meet": replace(
        CALM, seed=0, samples=60, faults=(Fault("connections break", 6.0, 0.0, 0),)
    ),
    "a lost driver is not noticed by its workers": replace(
        CALM, seed=0, samples=90, pace=2.0, faults=(Fault("cut from the store", 6.0, 100.0, 0),)
    ),
    "workers that do not hear a decision are not given up": replace(
        CALM, seed=0, samples=90, pace=2.0, faults=(Fault("stop worker for good", 6.0, 0.0, 1),)
    ),
    "a job begins without hosts that have just connected": replace(
        CALM, seed=0, num_hosts=3, faults=(Fault("cut", 0.0, 4.5, 2),)
    ),
    "a replacement gets its local rank by age, and with it a device that is in use": replace(
        CALM,
        seed=0,
        num_hosts=1,
        slots=2,
        samples=60,
        faults=(Fault("kill worker", 6.0, 0.0, 0),),
    ),
    "a wait in the store has no end": replace(CALM, seed=0, samples=90, pace=2.0),
    "whoever waits for the background thread is not woken": replace(BUSY, seed=0),
    "workers whose program hangs are not given up": HANGING,
    "the stall inspector ends nothing": HANGING,
    "a worker that loses the store while it meets others ends with an error": replace(
        CALM,
        seed=35,
        samples=60,
        faults=(
            Fault("slow network", 0.0, 20.0, 0),
            Fault("slow network", 0.0, 20.0, 1),
            Fault("connections break", 4.02, 0.0, 0),
            Fault("connections break", 3.96, 0.0, 1),
        ),
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
        300,
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
    "workers that lost their slot count only when nobody else is left": Plan.from_seed(1426),
    "a worker that lost its slot leaves at once below the minimum": Plan.from_seed(2042),
    "a worker that lost its slot gives it away though it has chosen its device": (
        Plan.from_seed(1617)
    ),
    "ranks that have connected wait for the others without end": CUT_OFF,
}
"""Jobs that have once broken a promise, by the mutant that has the mistake again, or once would.

They find it with any order of threads, so that other changes of the code do not hide it.
"""


def plans_for(name: str) -> Iterator[Plan]:
    """Yield jobs that may show a mistake, if some were made for it."""
    if name in MOMENTS:
        yield from map(MOMENTS[name], range(20))
    elif name in FOUND:
        first = FOUND[name].seed
        yield from (replace(FOUND[name], seed=seed) for seed in range(first, first + 20))


@pytest.mark.parametrize("seed", [1, 2, 4, 528, 1091, 1289, 1312, 1341, 1473, 1523])
def test_promises_are_kept(seed: int):
    """With 1341 a worker finishes out of the launcher's reach, and the job begins anew."""
    result = simulate(Plan.from_seed(seed))
    assert not result.problem, result.story()


@pytest.mark.parametrize("seed", [20, 21])
def test_many_decisions_that_follow_each_other(seed: int):
    """With these orders of threads the oldest worker must not leave before it has the state."""
    result = simulate(replace(MANY_DECISIONS, seed=seed))
    assert not result.problem, result.story()


def test_workers_that_come_too_late_for_their_slot_end():
    plan = FOUND["workers of a decision that never formed count as having the state"]
    result = simulate(replace(plan, seed=2))
    assert not result.problem, result.story()


@pytest.mark.parametrize("name", [*FOUND, *MOMENTS])
def test_what_was_found_is_mended(name: str):
    """The job keeps its promises, and breaks one with the mistake, whatever the order of threads.

    A seed is another order: with some of them faults that are close together miss their moment.
    """
    (mutant,) = [each for each in MUTANTS if each.name == name]
    for plan in plans_for(name):
        result = simulate(plan)
        assert not result.problem, result.story()
        if simulate(plan, mutant.patches).problem:
            return
    pytest.fail("no job shows the mistake")


def test_hosts_that_are_lost_after_training_fail_the_job_and_are_named():
    plan = replace(CALM, num_hosts=1, slots=2, faults=(Fault("slow network", 0.0, 600.0, 0),))
    done = [when for when, what in simulate(plan).events if "horovodrun: done" in what]
    loss = Fault("power loss", max(done) - 1000.0 + 0.01, 5.0, 0)  # before their exits arrive
    result = simulate(replace(plan, faults=(*plan.faults, loss)))
    assert not result.problem, result.story()
    assert result.status == 137
    assert "had finished training, and then failed: lost with its host" in result.ending
    (mutant,) = [each for each in MUTANTS if each.name.startswith("nobody says why")]
    assert simulate(result.plan, mutant.patches).problem


@pytest.mark.parametrize("plan", [CALM, BUSY])
def test_a_job_without_faults(plan: Plan):
    result = simulate(plan)
    assert (result.problem, result.status, result.generations) == ("", 0, 1), result.story()
    assert result.decisions == ["start"]


def test_the_same_seed_gives_the_same_events():
    """Whatever the hashes of texts, and whether the process has run another job before."""
    program = (
        "from tests.simulation.job import simulate\n"
        "from tests.simulation.plan import Plan\n"
        "print(simulate(Plan.from_seed(2)).fingerprint())"
    )
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another one than here
    alone = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    simulate(CALM)
    assert alone.stdout.strip() == simulate(Plan.from_seed(2)).fingerprint()


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
