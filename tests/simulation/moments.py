"""Jobs whose faults hit a moment that the same job without them has shown, by a mutant's name."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.job import simulate
from tests.simulation.plan import Fault, Plan

CALM = Plan(1, 2, 1, 1, samples=12, pace=0.5, commit_every=2, faults=())


def last_time(plan: Plan, what: str) -> float:
    """Return when an event has come for the last time in a job, and fail if it has not."""
    return max(when - 1000.0 for when, text in simulate(plan).events if what in text)


def news_that_comes_late(seed: int) -> Plan:
    """Make a job in which the driver decides anew before it hears that a generation has formed.

    A worker is lost in that moment. Its neighbour, which has just chosen its device by the slot
    above, must keep that. The moment is a little earlier than in the job without faults, because
    with the mistake workers meet with one message less.
    """
    plan = replace(CALM, seed=seed, num_hosts=3, slots=2, samples=120)
    lines = [(when - 1000.0, what) for when, what in simulate(plan).events]
    formed = max(when for when, what in lines if ": is rank " in what) - 0.006
    hosts = [what.split()[-3].strip(",") for _, what in lines if "horovodrun: started" in what]
    faults = (
        Fault("slow network", formed - 0.002, 5.0, 0),  # of the oldest worker, which tells it
        Fault("kill worker", formed + 0.001, 0.0, hosts.index("h2")),
    )
    return replace(plan, faults=faults)


def state_that_does_not_arrive(seed: int) -> Plan:
    """Make a job in which a new worker has met the one that has the state, and does not get it.

    The other one is to leave, as soon as the new worker has the state.
    """
    faults = Fault("kill worker", 10.0, 0.0, 1), Fault("host is not offered", 10.5, 200.0, 0)
    plan = replace(CALM, seed=seed, samples=60, pace=2.0, faults=faults)
    formed = last_time(plan, "is rank 1 of 2")
    more = (
        Fault("slow network", formed - 0.001, 5.0, 1),
        Fault("connections break", formed + 0.02, 0.0, 1),
    )
    return replace(plan, faults=(*faults, *more))


def heir_that_is_lost(seed: int) -> Plan:
    """Make a job in which the only worker that is to stay is lost before the other one has left.

    The launcher hears of it some seconds later.
    """
    faults = Fault("kill worker", 10.0, 0.0, 1), Fault("host is not offered", 10.5, 200.0, 0)
    plan = replace(CALM, seed=seed, samples=60, pace=2.0, faults=faults)
    formed = last_time(plan, "is rank 1 of 2")
    more = (
        Fault("cut towards the launcher", formed + 0.5, 5.0, 1),
        Fault("kill worker", formed + 1.0, 0.0, 1),
    )
    return replace(plan, faults=(*faults, *more))


def workers_that_had_met(seed: int) -> Plan:
    """Make a job in which all workers are lost twice, the second time after they have met.

    The news of that is on its way over a slow link when one of them is lost, and arrives after the
    decision that follows.
    """
    faults = Fault("kill worker", 1.0, 0.0, 0), Fault("kill worker", 1.1, 0.0, 0)
    plan = replace(CALM, seed=seed, samples=60, pace=2.0, faults=faults)
    formed = last_time(plan, "horovodrun: formed")
    more = (
        Fault("slow network", formed - 0.002, 5.0, 0),
        Fault("kill worker", formed - 0.001, 0.0, 1),
        Fault("cut", formed + 0.02, 5.0, 1),  # no other worker comes at once
        Fault("kill worker", formed + 0.8, 0.0, 0),
    )
    return replace(plan, faults=(*faults, *more))


MOMENTS = {
    "a worker that has chosen a device does not say so": news_that_comes_late,
    "new workers count as having the state before they have received it": (
        state_that_does_not_arrive
    ),
    "a worker that lost its slot leaves before the others have met": heir_that_is_lost,
    "workers that lost their slot do not count when all others are lost": heir_that_is_lost,
    "a generation does not count as formed if the next decision was made meanwhile": (
        workers_that_had_met
    ),
}
"""What makes a job that finds a mutant, from a seed, which is another order of threads."""
