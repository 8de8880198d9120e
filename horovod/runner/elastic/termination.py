"""Decide when an elastic job is over, and what people are told about it: a part of the policy.

`policy.make_plan` calls `find_ending` first. A job ends well when its workers have finished. It
ends badly when it would be of no use to go on (all workers fail by themselves, or before they could
begin), when it is not allowed (the reset limit), or when it is not possible (every host is
blacklisted, or there are too few workers for longer than the elastic timeout). Like all of the
policy, these are pure functions.
"""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass

from horovod.common.generations.decisions import DRIVER_LOST
from horovod.observe.reports.amounts import count_of
from horovod.runner.elastic.job_state import JobState, Limits
from horovod.runner.output.report import Exit, Outcome, first_to_fail

RESET_LIMIT_EXCEEDED_MESSAGE = (
    "the number of resets during elastic job exceeded limit: {} (--reset-limit)"
)
_MOST_FRUITLESS = 2
"""How many times in a row all workers may be lost before a generation has formed."""


@dataclass(frozen=True)
class Ending:
    """Why the job is over; with neither problem nor failure it has succeeded."""

    problem: str = ""
    failure: Exit | None = None
    status: int = 1


def find_ending(state: JobState, limits: Limits) -> Ending | None:
    """Return the ending of the job; None if it goes on."""
    running = any(not process.is_dismissed for process in state.alive.values())
    if not running and state.bad_end:
        return Ending(_describe_bad_end(state.bad_end), state.bad_end)
    if not running and state.ended_well:
        return Ending(failure=state.unrecovered)
    if state.no_hosts:
        return Ending(state.no_hosts, state.last_failure)
    if state.is_over:
        return None
    if are_all_lost(state):
        ending = _ending_if_useless(state)
        if ending is not None:
            return ending
        state = dataclasses.replace(state, failures=[])
    return _ending_without_hosts(state, limits) or _ending_after_timeout(state, limits)


def make_outcome(state: JobState, ending: Ending) -> Outcome:
    """Return the outcome of a job with this ending."""
    first = ending.failure
    outcome = Outcome(first_failure=first, problem=ending.problem, problem_status=ending.status)
    if first is not None:
        outcome.exits = list(state.failures)
        early = [state.ended_well.get(rank) for rank in first.because_of or ()]
        outcome.early_exits = [exit for exit in early if exit is not None]
    return outcome


def reset_limit_ending(state: JobState, limits: Limits) -> Ending:
    """Return the ending of a job that needs a decision which the reset limit forbids."""
    return Ending(RESET_LIMIT_EXCEEDED_MESSAGE.format(limits.reset_limit), state.last_failure)


def are_all_lost(state: JobState) -> bool:
    """Return whether all workers that trained, or began to, are lost. Others may begin anew."""
    if not state.failures or state.is_over:
        return False
    return not (state.members() if state.number else state.workers)


def shortage_start(state: JobState, limits: Limits) -> float | None:
    """Return when the workers became too few; None if there are enough."""
    if state.number:
        enough = len(state.members()) >= limits.min_np
    else:
        workers = state.workers
        anybody_waits = not workers or any(w.ready_at is not None for w in workers)
        enough = not anybody_waits and not state.obstacle
    if enough:
        return None
    return state.now if state.short_since is None else state.short_since


def describe_shortage(state: JobState, limits: Limits) -> str:
    """Return a line for people if the job waits because hosts are missing; empty if not."""
    if not state.hosts_known or state.is_over or state.short_since is None:
        return ""
    if state.obstacle:
        can_begin = _count_ready(state) >= limits.min_np and not state.number
        limit = "" if can_begin else f"up to {limits.elastic_timeout:g} s "
        return f"waiting {limit}for room: {_describe_lack(state, limits)}"
    wanted = limits.min_np if state.number else limits.num_proc
    enough = max(state.slots, len(state.workers)) >= wanted
    if enough or (state.workers and not state.number):
        return ""
    return f"waiting up to {limits.elastic_timeout:g} s for hosts: {_describe_lack(state, limits)}"


def _describe_bad_end(failure: Exit) -> str:
    """Return a line for people about a worker that has trained to the end and failed then."""
    return (
        f"rank {failure.rank} on {failure.host} had finished training, and then failed: "
        f"{failure.describe()}. What its script does after training may not have happened: check "
        f"what it should have written"
    )


def _ending_if_useless(state: JobState) -> Ending | None:
    """Return the ending if all workers are lost and others would fail in the same way."""
    exits = state.failures
    blamed = first_to_fail(exits)
    assert blamed is not None, "all of them failed"
    again = state.fruitless_starts + (not state.have_met) >= _MOST_FRUITLESS
    # One that was lost with its host before it ran (a negative code) says nothing about others.
    if all(exit.pid == 0 and exit.code > 0 for exit in exits):  # none could be started
        others = set(state.usable) - {exit.host for exit in exits}
        return None if others and not again else Ending(state.host_problem, status=blamed.status)
    if all(exit.code > 0 and exit.code != DRIVER_LOST for exit in exits):
        return Ending(failure=blamed)  # by themselves, not by a signal or with their host
    if again:
        return Ending("all workers were lost again before they could begin", blamed)
    return None


def _ending_without_hosts(state: JobState, limits: Limits) -> Ending | None:
    if len(state.workers) >= limits.min_np or not state.hosts:
        return None
    if state.excluded_hosts >= set(state.hosts):
        failure = state.last_failure
        last = state.host_problem
        if failure is not None:
            last = f"rank {failure.rank} on {failure.host}, {failure.describe()}"
        return Ending(
            f"every host has failed too often (--max-worker-failures), and "
            f"{_describe_workers(state)}; the last: {last}",
            failure,
        )
    if state.number and not state.workers and not state.slots and not state.failures:
        return Ending("all workers have left, as they were told to", status=128 + signal.SIGTERM)
    return None


def _ending_after_timeout(state: JobState, limits: Limits) -> Ending | None:
    since, seconds = shortage_start(state, limits), limits.elastic_timeout
    if since is None or state.now - since < seconds:
        return None
    return Ending(
        f"gave up after {seconds:g} s (--elastic-timeout): {_describe_lack(state, limits)}",
        state.last_failure,
    )


def _describe_lack(state: JobState, limits: Limits) -> str:
    if state.obstacle:
        needed = count_of(limits.min_np, "worker")
        begun = _describe_workers(state) if state.number else f"{_count_ready(state)} can begin"
        return f"the job needs {needed}, and {begun}. {state.obstacle}"
    hosts = ", ".join(f"{host}:{slots}" for host, slots in state.usable.items()) or "no host"
    if state.blacklisted:
        hosts += f"; not used after failures: {', '.join(sorted(state.blacklisted))}"
    if state.number == 0 and not state.workers:
        return (
            f"the job needs {count_of(limits.num_proc, 'slot')} to begin, and "
            f"{state.slots} {'is' if state.slots == 1 else 'are'} offered ({hosts})"
        )
    return f"the job needs {limits.min_np} workers, and {_describe_workers(state)} ({hosts})"


def _describe_workers(state: JobState) -> str:
    placed, ready = len(state.members()), _count_ready(state)
    starting = len(state.newcomers()) - ready
    extra = [f"{ready} ready"] * bool(ready) + [f"{starting} starting"] * bool(starting)
    verb = "is" if placed == 1 else "are"
    return f"{placed} {verb} left" + (f" ({', '.join(extra)})" if extra else "")


def _count_ready(state: JobState) -> int:
    """Return how many new workers are ready to join."""
    return sum(worker.ready_at is not None for worker in state.newcomers())
