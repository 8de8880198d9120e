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
KILLED_AGENT = replace(
    CALM, num_hosts=1, min_np=2, samples=10, pace=60.0, faults=(Fault("kill agent", 20.0, 0.0, 0),)
)
STOPPED_AGENT = replace(CALM, faults=(Fault("stop agent for good", 8.0, 0.0, 1),))
CUT = FixedPlan(
    201,
    3,
    3,
    9,
    samples=11,
    pace=0.5,
    commit_every=1,
    faults=(Fault("cut between hosts", 1.5616, 71.07, 805),),
)
"""A link between two hosts is cut while the ranks connect."""

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
    "ranks that wait for one that hangs do not name it": HANG,
    "ranks that wait for one that never came do not name it": replace(
        CALM,
        seed=30,
        slots=3,
        min_np=6,
        samples=4,
        faults=(Fault("cut from the store", 2.757, 35.9, 706),),
    ),
    "a rank that names one at a cut link is blamed in place of it": CUT,
    "ranks that could not connect do not say whom they missed": replace(
        CUT,
        seed=282,
        num_hosts=4,
        min_np=12,
        samples=12,
        pace=5.0,
        faults=(
            Fault("cut between hosts", 2.276, 244.4, 857),
            Fault("stop worker", 18.28, 24.0, 252),
        ),
        includes_head=True,
    ),
    "ranks that have run an operation are blamed by those in the middle of it": replace(
        CUT,
        seed=174,
        samples=6,
        pace=5.0,
        faults=(Fault("worker's program hangs", 9.446, 190.0, 185),),
    ),
    "a rank that hangs in an operation which nobody finishes without it is not named": replace(
        CUT,
        seed=871,
        slots=1,
        num_hosts=4,
        min_np=4,
        samples=10,
        faults=(Fault("worker's program hangs", 3.7362237459160563, 5.6, 453),),
    ),
    "a rank that waited is blamed in place of one that hung for a while": replace(
        CUT,
        seed=892,
        slots=1,
        min_np=3,
        faults=(Fault("stop worker", 5.0, 109.0, 2),),
    ),
    "those who waited for a rank that cannot be ended are blamed": replace(
        CALM,
        faults=(
            Fault("stop agent for good", 8.0, 0.0, 1),
            Fault("stop worker for good", 8.1, 0.0, 2),
        ),
    ),
    "those who waited for a rank on the launcher's host that cannot be ended are blamed": replace(
        CALM,
        includes_head=True,
        faults=(
            Fault("stop agent for good", 8.0, 0.0, 1),
            Fault("stop worker for good", 8.1, 0.0, 0),
        ),
    ),
    "the workers of an agent that was killed are left running": KILLED_AGENT,
    "an agent that is stopped is waited for without end": STOPPED_AGENT,
    "an agent that is stopped is left on its host": STOPPED_AGENT,
    "an agent waits for its source without end": replace(
        CUT,
        seed=0,
        faults=(
            Fault("slow network", 0.0, 9.0, 0),
            Fault("slow network", 0.0, 9.0, 1),
            Fault("power loss", 0.7, 400.0, 2),  # of the launcher's host
        ),
        includes_head=True,
    ),
    "a host that does not answer is waited for without end": replace(
        CALM,
        faults=(
            Fault("slow network", 0.0, 60.0, 1),
            Fault("stop agent for good", 0.9, 0.0, 1),  # before its first word has arrived
        ),
    ),
}
"""Jobs that find a mistake. Those of seeds are what the simulation has found itself."""


def test_a_job_without_faults():
    result = simulate(CALM)
    assert (result.problem, result.status) == ("", 0), result.story()


def test_the_launchers_own_host_takes_part():
    result = simulate(replace(CALM, includes_head=True))
    assert (result.problem, result.status) == ("", 0), result.story()


@pytest.mark.parametrize("seed", [*range(12), 67, 401, 668, 809, 1530])
def test_promises_are_kept(seed: int):
    """With 67 a host is lost, and all other ranks end because of it before the launcher knows.

    With 401 and 668 a rank and the agent on the launcher's own host are lost, with 809 a stopped
    agent is out of reach, and with 1530 ranks train on without the store.
    """
    result = simulate(FixedPlan.from_seed(seed))
    assert not result.problem, result.story()


@pytest.mark.parametrize("name", FOUND)
def test_mistakes_are_found(name: str):
    """The job keeps its promises, and breaks one with the mistake, with some order of threads."""
    (mutant,) = [each for each in FIXED_MUTANTS if each.name == name]
    for seed in range(FOUND[name].seed, FOUND[name].seed + 10):
        plan = replace(FOUND[name], seed=seed)
        result = simulate(plan)
        assert not result.problem, result.story()
        if simulate(plan, mutant.patches).problem:
            return
    pytest.fail(f"10 seeds from {FOUND[name].seed} on do not show the mistake")


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
