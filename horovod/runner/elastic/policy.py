"""Decide what an elastic job does next: pure functions from the job's state to a plan.

The driver calls `make_plan` after every event, and executes the `ElasticPlan`. Nothing here looks
at a clock, a host or a process, or changes the state. `termination` has the rules for the end of
the job, which come first.

The rules, in the order of their importance:

- Survivors keep their processes and their state; the oldest becomes rank 0. A decision removes a
  dead worker from the job at once. Its replacement joins by a later decision, when its process has
  started and waits in `init`, so that no survivor waits for its imports.
- A worker keeps its slot, and a replacement takes the lowest free slot of its host. Local ranks
  follow the slots: every worker of a complete host keeps the local rank with which it began, and
  with it a GPU that no other worker has chosen. Ranks follow the age instead: scripts may broadcast
  from rank 0, which must therefore not be a new worker while others have the state.
- A job begins with at least `num_proc` slots and uses all that are offered, up to `max_np`. With
  fewer than `min_np` workers the survivors keep their state and wait for others.
- A host that is not offered any more, or offers fewer slots, loses its youngest workers. A
  blacklisted host gets no new workers, and loses the ones it has if enough others are left. The
  last workers that have the state stay until others have said that they received it; before any has
  said so, the oldest workers count as those that have it. If no worker of a decision that has the
  state is left, those that it left out count again, while they live (`JobState.members`).
- Once a worker has finished, no worker is added or replaced: those that are left finish. If that
  happens before the first decision, workers that call `init` later begin without it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.topology import Slot
from horovod.runner.elastic import termination
from horovod.runner.elastic.job_state import JobState, Limits, Process
from horovod.runner.slots.hosts import Host, plan_slots

SETTLE_SECONDS = 1.0
"""Seconds for which new workers that are ready wait for others that are still starting, so that one
decision may add all of them."""


@dataclass(frozen=True)
class Proposal:
    """The next decision, without its number and its reason."""

    members: tuple[Process, ...]  # oldest first
    kind: str
    lost: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    min_np: int = 1


@dataclass(frozen=True)
class ElasticPlan:
    """The next actions of the driver."""

    start: tuple[str, ...] = ()  # a host for each new worker
    stop: tuple[int, ...] = ()  # workers that were in no decision and will be in none
    proposal: Proposal | None = None
    ending: termination.Ending | None = None  # the job is over
    release: bool = False  # end the workers that wait for others, which will not come
    begin_anew: bool = False  # all workers are lost: forget the failures so far
    short_since: float | None = None  # the new value for the state


def make_plan(state: JobState, limits: Limits) -> ElasticPlan:
    """Return the next step of a job.

    Args:
        state: Everything that is known about the job.
        limits: What the user asked for.
    """
    ending = termination.find_ending(state, limits)
    if ending is not None and not _has_unused_slots(state, limits):
        return ElasticPlan(ending=ending)
    if state.is_over:
        return _finish(state, limits)
    begin_anew = termination.are_all_lost(state)
    if begin_anew:
        state = dataclasses.replace(state, failures=[])
    members = _members(state)
    keep = _members_to_keep(state, members, limits)
    new, superfluous = _split_newcomers(state, keep, limits)
    # Without members to keep, no worker would read a decision.
    forced = keep and (state.failed_workers or state.departed_workers or len(keep) < len(members))
    spent = limits.reset_limit is not None and state.number > limits.reset_limit
    starting = _hosts_to_start(state, keep, new, limits)
    # At the beginning, workers come from hosts that connect, or that have just connected.
    is_empty_host = bool(starting and {*starting} - {worker.host for worker in state.workers})
    hosts_to_come = not keep and (state.hosts_connecting or is_empty_host)
    joining = [] if spent and keep else _newcomers_to_join(state, keep, new, limits, hosts_to_come)
    proposal = None
    if forced or state.decision_requested or joining:
        if spent:
            return ElasticPlan(ending=termination.reset_limit_ending(state, limits))
        proposal = _propose(state, members, keep, joining, limits)
    return ElasticPlan(
        tuple(starting),
        tuple(worker.number for worker in superfluous),
        proposal,
        begin_anew=begin_anew,
        short_since=termination.shortage_start(state, limits),
    )


def expect_assignments(state: JobState, limits: Limits) -> dict[int, Slot]:
    """Return the ranks that workers will have if all that run or can be started take part."""
    keep = _members_to_keep(state, _members(state), limits)
    new, _ = _split_newcomers(state, keep, limits)
    ready_hosts = dataclasses.replace(state, resting_hosts=frozenset(), failures=[])
    more = _hosts_to_start(ready_hosts, keep, new, limits)
    last = max((worker.number for worker in state.workers), default=0)
    # Workers that are not started yet take the slots that the others leave free.
    above = 1 + max((worker.index for worker in state.workers), default=-1)
    new += [Process(last + 1 + n, host, above + n) for n, host in enumerate(more)]
    return arrange(_assign_seats(state, keep, new))


def arrange(members: Iterable[Process]) -> dict[int, Slot]:
    """Assign ranks by age, with the ranks of a host side by side, and local ranks by slot."""
    by_host: dict[str, list[Process]] = {}
    for worker in sorted(members, key=lambda w: w.age):
        by_host.setdefault(worker.host, []).append(worker)
    hosts = [Host(name, len(workers)) for name, workers in by_host.items()]
    planned = iter(plan_slots(hosts, sum(len(workers) for workers in by_host.values())))
    assignments = {}
    for workers in by_host.values():
        slots_by_age = list(itertools.islice(planned, len(workers)))
        in_slot_order = sorted(workers, key=lambda w: w.index)
        by_index = {w.number: slot for w, slot in zip(in_slot_order, slots_by_age, strict=True)}
        for worker, by_age in zip(workers, slots_by_age, strict=True):
            slot = by_index[worker.number]
            assignments[worker.number] = dataclasses.replace(slot, rank=by_age.rank)
    return assignments


def _members(state: JobState) -> list[Process]:
    return sorted(state.members(), key=lambda w: w.age)


def _members_to_keep(state: JobState, members: Sequence[Process], limits: Limits) -> list[Process]:
    """Return the members that stay in the job."""
    sound = _fit_into(members, state.usable)
    tolerated = _fit_into(members, state.hosts)
    stay = sound if len(sound) >= limits.min_np else tolerated
    # Until a worker has said that it has the state, the generation of this decision or of an
    # earlier one may just be forming. The oldest members are in all of these.
    oldest = [worker for worker in members if worker.joined == members[0].joined]
    holders = [worker for worker in members if worker.has_state] or oldest
    if any(worker in stay for worker in holders):
        return stay
    return list(members)  # those that have the state must first hand it over


def _fit_into(workers: Sequence[Process], room: Mapping[str, int]) -> list[Process]:
    """Return as many workers of each host as it has room for, in the order given."""
    left = dict(room)
    stay = []
    for worker in workers:
        if left.get(worker.host, 0) > 0:
            left[worker.host] -= 1
            stay.append(worker)
    return stay


def _split_newcomers(
    state: JobState, keep: Sequence[Process], limits: Limits
) -> tuple[list[Process], list[Process]]:
    """Return the new workers for which there is room, and the others."""
    new, left = state.newcomers(), state.usable
    if not new:
        return [], []
    for worker in keep:
        left[worker.host] = left.get(worker.host, 0) - 1
    fitting = _fit_into(sorted(new, key=lambda w: (w.ready_at is None, w.number)), left)
    if limits.max_np is not None:
        fitting = fitting[: max(0, limits.max_np - len(keep))]
    return fitting, [worker for worker in new if worker not in fitting]


def _newcomers_to_join(
    state: JobState,
    keep: Sequence[Process],
    new: Sequence[Process],
    limits: Limits,
    hosts_to_come: bool,
) -> list[Process]:
    """Return the new workers that the next decision adds."""
    since = [worker.ready_at for worker in new if worker.ready_at is not None]
    if not since:
        return []
    beginning = not keep
    patience = limits.start_timeout if beginning else SETTLE_SECONDS
    more_to_come = len(since) < len(new) or hosts_to_come
    if more_to_come and state.now < min(since) + patience:
        return []
    if len(keep) + len(since) < limits.min_np or (beginning and state.now < state.fenced_until):
        return []
    return [worker for worker in new if worker.ready_at is not None]


def _propose(
    state: JobState,
    members: Sequence[Process],
    keep: Sequence[Process],
    joining: Sequence[Process],
    limits: Limits,
) -> Proposal:
    if not keep:
        kind = "start"
    elif state.failed_workers or state.decision_requested:
        kind = "failure"
    elif len(keep) < len(members) or state.departed_workers:
        kind = "mixed" if joining else "removed"
    else:
        kind = "added"
    proposed = _assign_seats(state, keep, joining)
    return Proposal(
        members=tuple(sorted(proposed, key=lambda w: w.age)),
        kind=kind,
        lost=(*state.failed_workers, *state.finished_workers),
        added=tuple(worker.number for worker in proposed[len(keep) :]),
        min_np=limits.min_np,
    )


def _assign_seats(
    state: JobState, keep: Sequence[Process], joining: Sequence[Process]
) -> list[Process]:
    """Return the members `keep` and workers that join, with the seats and slots of all.

    Workers that join get seats host by host, and each takes the lowest slot that no member of its
    host has. Nearly always that is the slot in which it was started; it is a lower one if the
    worker there is late, or was lost meanwhile. All lower slots are then occupied, so its first
    local rank is its slot, and a script that chooses a GPU by local rank never chooses a member's.
    A member that was in no generation that formed does not know its local rank yet: it takes the
    lowest slot again, as lower ones may have become free. If its generation forms meanwhile, this
    decision is not made (`JobState.keeps_slot`, `DecisionLog`).
    """
    occupied: dict[str, set[int]] = {worker.host: set() for worker in [*keep, *joining]}
    for worker in filter(state.keeps_slot, keep):
        occupied[worker.host].add(worker.index)
    free = {
        host: itertools.filterfalse(taken.__contains__, itertools.count())
        for host, taken in occupied.items()
    }
    movable = [*itertools.filterfalse(state.keeps_slot, keep), *joining]
    slots = {w.number: next(free[w.host]) for w in sorted(movable, key=lambda w: w.index)}
    order = {host: position for position, host in enumerate(state.hosts)}
    ordered = sorted(joining, key=lambda w: (order.get(w.host, len(order)), w.number))
    seated = [
        dataclasses.replace(worker, joined=state.number + 1, seat=seat)
        for seat, worker in enumerate(ordered)
    ]
    return [
        dataclasses.replace(worker, index=slots.get(worker.number, worker.index))
        for worker in [*keep, *seated]
    ]


def _finish(state: JobState, limits: Limits) -> ElasticPlan:
    """Return the next step of a job that comes to its end."""
    if state.interrupted and state.too_few:
        return ElasticPlan(release=True)
    if state.number == 0 and not state.interrupted:
        return _begin_without(state, limits)
    members = tuple(_members(state))
    has_lost = bool(state.failed_workers or state.decision_requested)
    # Workers that ended well are no reason for a decision, unless the others request one.
    if not members or not (has_lost or state.departed_workers):
        return ElasticPlan()
    lost = (*state.failed_workers, *state.finished_workers)
    return ElasticPlan(proposal=Proposal(members, "failure" if has_lost else "removed", lost))


def _begin_without(state: JobState, limits: Limits) -> ElasticPlan:
    """Return the next step if a worker has finished before the first decision.

    The others may still form a generation without it, or finish too. Workers that call `init` wait
    until all others have called it or ended. Slots that were never used get workers.
    """
    start = _unused_hosts(state, limits)
    more_to_come = state.hosts_connecting or any(
        worker.ready_at is None for worker in state.workers
    )
    if start or more_to_come or not state.workers:
        return ElasticPlan(tuple(start))
    return ElasticPlan(proposal=Proposal(tuple(_assign_seats(state, [], state.workers)), "start"))


def _has_unused_slots(state: JobState, limits: Limits) -> bool:
    """Return whether workers have finished while others, before the first decision, never ran."""
    if state.number or not state.finishing or state.interrupted or state.no_hosts:
        return False
    return state.hosts_connecting or bool(_unused_hosts(state, limits))


def _unused_hosts(state: JobState, limits: Limits) -> list[str]:
    """Return the hosts of slots that had no worker so far, before the first decision."""
    gone = [Process(-1, host) for host in state.ended_early]
    return _hosts_to_start(
        dataclasses.replace(state, failures=[]), [], [*state.workers, *gone], limits
    )


def _hosts_to_start(
    state: JobState, keep: Sequence[Process], new: Sequence[Process], limits: Limits
) -> list[str]:
    """Return a host for each new worker that can be started: the first hosts with room."""
    if state.number == 0 and not state.workers and state.slots < limits.num_proc:
        return []
    if not keep and state.failures and any(worker.ready_at is None for worker in new):
        return []  # wait for those that start now: if all of them fail as well, the job ends
    room = {h: n for h, n in state.usable.items() if h not in state.resting_hosts}
    for worker in (*keep, *new):
        if worker.host in room:
            room[worker.host] -= 1
    wanted = sum(max(0, n) for n in room.values())
    if limits.max_np is not None:
        wanted = min(wanted, limits.max_np - len(keep) - len(new))
    hosts: list[str] = []
    for host, n in room.items():
        hosts += [host] * max(0, min(n, wanted - len(hosts)))
    return hosts
