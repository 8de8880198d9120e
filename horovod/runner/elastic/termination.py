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

from horovod.runner.elastic.status import count
from horovod.runner.elastic.view import Limits, View, WorkerFailure
from horovod.runner.output.report import first_to_fail

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


def find_ending(view: View, limits: Limits) -> Ending | None:
    """The end, if this is it."""
    if not view.running and view.anybody_finished:
        return Ending(failure=view.unforgiven)
    if view.no_hosts:
        return Ending(view.no_hosts, view.last_failure)
    if view.over:
        return None
    if all_lost(view):
        ending = _useless(view)
        if ending is not None:
            return ending
        view = dataclasses.replace(view, failures=())
    return _nowhere_to_go(view, limits) or _gave_up(view, limits)


def exhausted(view: View, limits: Limits) -> Ending:
    """A decision is needed that the reset limit forbids."""
    return Ending(RESET_LIMIT_EXCEEDED_MESSAGE.format(limits.reset_limit), view.last_failure)


def all_lost(view: View) -> bool:
    """Whether nobody is left of those that trained, or began to. Others may begin anew."""
    survivors = any(worker.placed or view.number == 0 for worker in view.workers)
    return bool(view.failures) and not survivors and not view.over


def short_since(view: View, limits: Limits) -> float | None:
    """Since when there are too few workers; None if there are enough."""
    placed = sum(worker.placed for worker in view.workers)
    anybody_waits = not view.workers or any(w.ready_at is not None for w in view.workers)
    enough = placed >= limits.min_np if view.number else not anybody_waits
    if enough:
        return None
    return view.now if view.short_since is None else view.short_since


def shortage(view: View, limits: Limits) -> str:
    """What the job waits for because hosts are missing, for people; empty if none are."""
    if not view.discovered or view.over or view.short_since is None:
        return ""
    wanted = limits.min_np if view.number else limits.num_proc
    enough = max(view.slots, len(view.workers)) >= wanted
    if enough or (view.workers and not view.number):
        return ""
    return f"waiting up to {limits.elastic_timeout:g} s for hosts: {_lack(view, limits)}"


def _useless(view: View) -> Ending | None:
    """All are lost: the end, if it would be the same again."""
    first = first_to_fail([failure.exit for failure in view.failures])
    assert first is not None, "all of them failed"
    blamed = next(failure for failure in view.failures if failure.exit is first)
    again = view.fruitless + (not view.met) >= _MOST_FRUITLESS
    if all(failure.exit.pid == 0 for failure in view.failures):  # none could be started
        others = set(view.usable) - {failure.exit.host for failure in view.failures}
        return None if others and not again else Ending(view.host_problem, status=first.status)
    if all(failure.exit.code > 0 for failure in view.failures):
        return Ending(failure=blamed)  # by themselves, not by a signal or with their host
    if again:
        return Ending("all workers were lost again before they could begin", blamed)
    return None


def _nowhere_to_go(view: View, limits: Limits) -> Ending | None:
    if len(view.workers) >= limits.min_np or not view.hosts:
        return None
    if view.for_good >= set(view.hosts):
        failure = view.last_failure
        last = view.host_problem
        if failure is not None:
            last = f"rank {failure.exit.rank} on {failure.exit.host}, {failure.exit.describe()}"
        return Ending(
            f"every host has failed too often (--max-worker-failures), and {_have(view)}; "
            f"the last: {last}",
            failure,
        )
    if view.number and not view.workers and not view.slots and not view.failures:
        return Ending("all workers have left, as they were told to", status=128 + signal.SIGTERM)
    return None


def _gave_up(view: View, limits: Limits) -> Ending | None:
    since, seconds = short_since(view, limits), limits.elastic_timeout
    if since is None or view.now - since < seconds:
        return None
    return Ending(
        f"gave up after {seconds:g} s (--elastic-timeout): {_lack(view, limits)}",
        view.last_failure,
    )


def _lack(view: View, limits: Limits) -> str:
    hosts = ", ".join(f"{host}:{slots}" for host, slots in view.usable.items()) or "no host"
    if view.blacklisted:
        hosts += f"; not used after failures: {', '.join(sorted(view.blacklisted))}"
    if view.number == 0 and not view.workers:
        return (
            f"the job needs {count(limits.num_proc, 'slot')} to begin, and "
            f"{view.slots} {'is' if view.slots == 1 else 'are'} offered ({hosts})"
        )
    return f"the job needs {limits.min_np} workers, and {_have(view)} ({hosts})"


def _have(view: View) -> str:
    placed = sum(worker.placed for worker in view.workers)
    ready = sum(w.ready_at is not None for w in view.workers if not w.placed)
    starting = len(view.workers) - placed - ready
    extra = [f"{ready} ready"] * bool(ready) + [f"{starting} starting"] * bool(starting)
    verb = "is" if placed == 1 else "are"
    return f"{placed} {verb} left" + (f" ({', '.join(extra)})" if extra else "")
