"""When an elastic job is over, and what is said about it: the part of the policy that is the end.

`policy.make_plan` asks `find_ending` first. A job ends well when its workers have finished. It ends
badly when going on is of no use (all workers fail by themselves, or before they could begin), not
allowed (the reset limit), or not possible (every host is blacklisted, or too few workers for longer
than the elastic timeout). Pure, as all of the policy.
"""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass

from horovod.common.decisions import DRIVER_LOST
from horovod.runner.elastic.job_state import JobState, Limits, WorkerFailure
from horovod.runner.elastic.status import count
from horovod.runner.output.report import Outcome, first_to_fail

RESET_LIMIT_EXCEEDED_MESSAGE = (
    "the number of resets during elastic job exceeded limit: {} (--reset-limit)"
)
_MOST_FRUITLESS = 2
"""Times in a row that all workers may be lost before they have met."""


@dataclass(frozen=True)
class Ending:
    """Why the job is over; with neither problem nor failure it has succeeded."""

    problem: str = ""
    failure: WorkerFailure | None = None
    status: int = 1


def find_ending(state: JobState, limits: Limits) -> Ending | None:
    """The end, if this is it."""
    running = any(not process.dismissed for process in state.alive.values())
    if not running and (state.ended_well or state.bad_end):
        return Ending(failure=state.bad_end or state.unrecovered)
    if state.no_hosts:
        return Ending(state.no_hosts, state.last_failure)
    if state.over:
        return None
    if all_lost(state):
        ending = _useless(state)
        if ending is not None:
            return ending
        state = dataclasses.replace(state, failures=[])
    return _nowhere_to_go(state, limits) or _gave_up(state, limits)


def outcome(state: JobState, ending: Ending) -> Outcome:
    """What became of the job."""
    found = Outcome(problem=ending.problem, problem_status=ending.status)
    if ending.failure is not None:
        first = found.first_failure = ending.failure.exit
        found.exits = [failure.exit for failure in state.failures]
        early = [state.ended_well.get(rank) for rank in first.because_of or ()]
        found.gone_early = [exit for exit in early if exit is not None]
    return found


def exhausted(state: JobState, limits: Limits) -> Ending:
    """A decision is needed that the reset limit forbids."""
    return Ending(RESET_LIMIT_EXCEEDED_MESSAGE.format(limits.reset_limit), state.last_failure)


def all_lost(state: JobState) -> bool:
    """Whether nobody is left of those that trained, or began to. Others may begin anew."""
    survivors = state.members() if state.number else state.workers
    return bool(state.failures) and not survivors and not state.over


def short_since(state: JobState, limits: Limits) -> float | None:
    """Since when there are too few workers; None if there are enough."""
    anybody_waits = not state.workers or any(w.ready_at is not None for w in state.workers)
    is_waiting = anybody_waits or bool(state.obstacle)
    enough = len(state.members()) >= limits.min_np if state.number else not is_waiting
    if enough:
        return None
    return state.now if state.short_since is None else state.short_since


def shortage(state: JobState, limits: Limits) -> str:
    """What the job waits for because hosts are missing, for people; empty if none are."""
    if not state.discovered or state.over or state.short_since is None:
        return ""
    if state.obstacle:
        can_begin = _ready(state) >= limits.min_np and not state.number
        limit = "" if can_begin else f"up to {limits.elastic_timeout:g} s "
        return f"waiting {limit}for room: {_lack(state, limits)}"
    wanted = limits.min_np if state.number else limits.num_proc
    enough = max(state.slots, len(state.workers)) >= wanted
    if enough or (state.workers and not state.number):
        return ""
    return f"waiting up to {limits.elastic_timeout:g} s for hosts: {_lack(state, limits)}"


def _useless(state: JobState) -> Ending | None:
    """All are lost: the end, if it would be the same again."""
    first = first_to_fail([failure.exit for failure in state.failures])
    assert first is not None, "all of them failed"
    blamed = next(failure for failure in state.failures if failure.exit is first)
    again = state.fruitless + (not state.met) >= _MOST_FRUITLESS
    exits = [failure.exit for failure in state.failures]
    # One that was lost with its host before it ran (a negative code) says nothing about others.
    if all(exit.pid == 0 and exit.code > 0 for exit in exits):  # none could be started
        others = set(state.usable) - {exit.host for exit in exits}
        return None if others and not again else Ending(state.host_problem, status=first.status)
    if all(exit.code > 0 and exit.code != DRIVER_LOST for exit in exits):
        return Ending(failure=blamed)  # by themselves, not by a signal or with their host
    if again:
        return Ending("all workers were lost again before they could begin", blamed)
    return None


def _nowhere_to_go(state: JobState, limits: Limits) -> Ending | None:
    if len(state.workers) >= limits.min_np or not state.hosts:
        return None
    if state.for_good >= set(state.hosts):
        failure = state.last_failure
        last = state.host_problem
        if failure is not None:
            last = f"rank {failure.exit.rank} on {failure.exit.host}, {failure.exit.describe()}"
        return Ending(
            f"every host has failed too often (--max-worker-failures), and {_have(state)}; "
            f"the last: {last}",
            failure,
        )
    if state.number and not state.workers and not state.slots and not state.failures:
        return Ending("all workers have left, as they were told to", status=128 + signal.SIGTERM)
    return None


def _gave_up(state: JobState, limits: Limits) -> Ending | None:
    since, seconds = short_since(state, limits), limits.elastic_timeout
    if since is None or state.now - since < seconds:
        return None
    return Ending(
        f"gave up after {seconds:g} s (--elastic-timeout): {_lack(state, limits)}",
        state.last_failure,
    )


def _lack(state: JobState, limits: Limits) -> str:
    if state.obstacle:
        needed = count(limits.min_np, "worker")
        begun = _have(state) if state.number else f"{_ready(state)} can begin"
        return f"the job needs {needed}, and {begun}. {state.obstacle}"
    hosts = ", ".join(f"{host}:{slots}" for host, slots in state.usable.items()) or "no host"
    if state.blacklisted:
        hosts += f"; not used after failures: {', '.join(sorted(state.blacklisted))}"
    if state.number == 0 and not state.workers:
        return (
            f"the job needs {count(limits.num_proc, 'slot')} to begin, and "
            f"{state.slots} {'is' if state.slots == 1 else 'are'} offered ({hosts})"
        )
    return f"the job needs {limits.min_np} workers, and {_have(state)} ({hosts})"


def _have(state: JobState) -> str:
    placed, ready = len(state.members()), _ready(state)
    starting = len(state.newcomers()) - ready
    extra = [f"{ready} ready"] * bool(ready) + [f"{starting} starting"] * bool(starting)
    verb = "is" if placed == 1 else "are"
    return f"{placed} {verb} left" + (f" ({', '.join(extra)})" if extra else "")


def _ready(state: JobState) -> int:
    """Return how many new workers wait for a place."""
    return sum(worker.ready_at is not None for worker in state.newcomers())
