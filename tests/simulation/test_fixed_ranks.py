"""Jobs with fixed ranks in the simulated cluster, and the agents that start their ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("greenlet")

from tests.simulation.fixed_mutants import FIXED_MUTANTS
from tests.simulation.fixed_plan import FixedPlan
from tests.simulation.job import simulate
from tests.simulation.modules import parse
from tests.simulation.plan import Fault

CALM = FixedPlan(1, 2, 2, 4, samples=20, pace=0.5, commit_every=1, faults=())
KILL = replace(CALM, faults=(Fault("kill worker", 8.0, 0.0, 1),))
HANG = replace(CALM, faults=(Fault("stop worker for good", 8.0, 0.0, 1),))

FOUND: dict[str, FixedPlan] = {
    "the launcher blames the last failure in place of the first": replace(
        KILL,
        seed=3,
        faults=(
            Fault("slow network", 5.0, 60.0, 0),  # the agent's, so that it stops nothing at once
            *KILL.faults,
            Fault("kill worker", 8.02, 0.0, 0),
        ),
    ),
    "a fixed job goes on without a lost rank": replace(KILL, samples=4, pace=60.0),
    "the exit status of a killed worker is taken for 0": KILL,
    "an agent that lost the launcher leaves its workers running": replace(
        CALM, samples=100, pace=5.0, faults=(Fault("kill the launcher", 20.0, 0.0, 0),)
    ),
    "an agent does not kill who ignores SIGTERM": HANG,
    "a rank that hangs is blamed before it has ended": HANG,
    "ranks that wait for one that hangs do not name it": HANG,
    "ranks that wait for one that never came do not name it": FixedPlan.from_seed(30),
}
"""Jobs that find a mistake; the last three are those that the simulation has found itself."""


def test_a_job_without_faults():
    result = simulate(CALM)
    assert (result.problem, result.status) == ("", 0), result.story()


def test_the_launchers_own_host_takes_part():
    result = simulate(replace(CALM, includes_head=True))
    assert (result.problem, result.status) == ("", 0), result.story()


@pytest.mark.parametrize("seed", [*range(12), 67])
def test_promises_are_kept(seed: int):
    """With 67 a host is lost, and all other ranks end because of it before the launcher knows."""
    result = simulate(FixedPlan.from_seed(seed))
    assert not result.problem, result.story()


@pytest.mark.parametrize("name", FOUND)
def test_mistakes_are_found(name: str):
    (mutant,) = [each for each in FIXED_MUTANTS if each.name == name]
    result = simulate(FOUND[name])
    assert not result.problem, result.story()
    assert simulate(FOUND[name], mutant.patches).problem


def test_a_rank_that_is_killed_is_named_with_its_status():
    result = simulate(KILL)
    assert (result.problem, result.status) == ("", 137), result.story()


def test_interrupting_the_launcher_ends_all():
    result = simulate(replace(CALM, faults=(Fault("interrupt the launcher", 8.0, 0.0, 0),)))
    assert (result.problem, result.status) == ("", 143), result.story()


@pytest.mark.parametrize("mutant", FIXED_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_can_be_made(mutant):
    """A change of the code must not leave a mutant behind that nobody can try."""
    parse(mutant.module, mutant.patches[mutant.module])
