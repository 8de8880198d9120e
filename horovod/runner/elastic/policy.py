"""What an elastic job does next: pure functions from what is known to what is to be done.

The driver asks whenever something has happened, and executes the `ElasticPlan`. Nothing here looks
at a clock, a host or a process, or changes the state. Whether it is the end is in `termination`,
and comes first.

The rules, in the order in which they matter:

- Survivors keep their processes and their state; the oldest becomes rank 0. Who dies is taken out
  of the job by a decision at once; whoever replaces it joins by a later one, when its process has
  started and waits for a place, so that nobody waits for imports.
- A worker keeps its slot, and a replacement takes the lowest slot that is free on its host. Local
  ranks follow the slots, so that every worker of a complete host has the local rank with which it
  began, and with it a GPU that nobody else has chosen. Ranks follow the age instead: scripts may
  broadcast from rank 0, which must therefore not be a new worker while others have the state.
- A job begins with at least `num_proc` slots and uses all that are offered, up to `max_np`. With
  fewer than `min_np` workers the survivors wait, with their state, for others.
- A host that is not offered any more, or offers fewer slots, loses its youngest workers; a
  blacklisted host gets no new workers, and loses those it has if enough others are left. But never
  the last workers that have the state, before others have received it.
- Once a worker has finished, nobody is added or replaced: the others finish with who is left. If
  that was before the first decision, those who come to `init` later begin without it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.decisions import Assignment
from horovod.runner.elastic import termination
from horovod.runner.elastic.job_state import JobState, Limits, Process
from horovod.runner.slots.hosts import Host, plan_slots

SETTLE_SECONDS = 1.0
"""For how long new workers that are ready wait for others that are still starting, so that one
decision may take in all of them."""


@dataclass(frozen=True)
class Proposal:
    """The next decision, without its number and words."""

    members: tuple[Process, ...]  # oldest first
    kind: str
    lost: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    min_np: int = 1


@dataclass(frozen=True)
class ElasticPlan:
    """What to do now."""

    start: tuple[str, ...] = ()  # a host for each new worker
    stop: tuple[int, ...] = ()  # workers that never had a place and will not get one
    proposal: Proposal | None = None
    ending: termination.Ending | None = None  # the job is over
    release: bool = False  # those who wait for others are to end: nobody will come
    begin_anew: bool = False  # all are lost, and what went wrong so far is forgotten
    short_since: float | None = None  # to be remembered


def make_plan(state: JobState, limits: Limits) -> ElasticPlan:
    """The next step."""
    ending = termination.find_ending(state, limits)
    if ending is not None and not _some_never_ran(state, limits):
        return ElasticPlan(ending=ending)
    if state.over:
        return _finish(state, limits)
    begin_anew = termination.all_lost(state)
    if begin_anew:
        state = dataclasses.replace(state, failures=[])
    members = _members(state)
    keep = _keep(state, members, limits)
    new, superfluous = _fitting(state, keep, limits)
    # Without `keep` nobody is there to be told.
    forced = keep and (state.failed or state.left or len(keep) < len(members))
    spent = limits.reset_limit is not None and state.number > limits.reset_limit
    joining = [] if spent and keep else _joining(state, keep, new, limits)
    proposal = None
    if forced or state.asked or joining:
        if spent:
            return ElasticPlan(ending=termination.exhausted(state, limits))
        proposal = _propose(state, members, keep, joining, limits)
    return ElasticPlan(
        tuple(_missing(state, keep, new, limits)),
        tuple(worker.number for worker in superfluous),
        proposal,
        begin_anew=begin_anew,
        short_since=termination.short_since(state, limits),
    )


def expect(state: JobState, limits: Limits) -> dict[int, Assignment]:
    """The places that workers will have if all that are there, or can be started, come to meet."""
    keep = _keep(state, _members(state), limits)
    new, _ = _fitting(state, keep, limits)
    ready_hosts = dataclasses.replace(state, resting=frozenset(), failures=[])
    more = _missing(ready_hosts, keep, new, limits)
    last = max((worker.number for worker in state.workers), default=0)
    # Workers that are still to be started take the slots that the others leave free.
    above = 1 + max((worker.index for worker in state.workers), default=-1)
    new += [Process(last + 1 + n, host, above + n) for n, host in enumerate(more)]
    return arrange([*keep, *_seated(state, keep, new)])


def arrange(members: Iterable[Process]) -> dict[int, Assignment]:
    """Assign ranks by age, with the ranks of a host side by side, and local ranks by slot."""
    by_host: dict[str, list[Process]] = {}
    for worker in sorted(members, key=lambda w: w.age):
        by_host.setdefault(worker.host, []).append(worker)
    hosts = [Host(name, len(workers)) for name, workers in by_host.items()]
    planned = iter(plan_slots(hosts, sum(len(workers) for workers in by_host.values())))
    places = {}
    for workers in by_host.values():
        here = list(itertools.islice(planned, len(workers)))
        in_slot_order = sorted(workers, key=lambda w: w.index)
        local_places = {w.number: place for w, place in zip(in_slot_order, here, strict=True)}
        for worker, by_age in zip(workers, here, strict=True):
            place = dataclasses.replace(local_places[worker.number], rank=by_age.rank)
            places[worker.number] = Assignment(**dataclasses.asdict(place))
    return places


def _members(state: JobState) -> list[Process]:
    return sorted(state.members(), key=lambda w: w.age)


def _keep(state: JobState, members: Sequence[Process], limits: Limits) -> list[Process]:
    """The members that stay."""
    sound = _within(members, state.usable)
    tolerated = _within(members, state.hosts)
    stay = sound if len(sound) >= limits.min_np else tolerated
    if any(state.formed or worker.joined != state.number for worker in stay):
        return stay
    return list(members)  # somebody has to hand the state over first


def _within(workers: Sequence[Process], room: Mapping[str, int]) -> list[Process]:
    """As many workers of each host as it has room for, in the order given."""
    left = dict(room)
    stay = []
    for worker in workers:
        if left.get(worker.host, 0) > 0:
            left[worker.host] -= 1
            stay.append(worker)
    return stay


def _fitting(
    state: JobState, keep: Sequence[Process], limits: Limits
) -> tuple[list[Process], list[Process]]:
    """New workers for whom there is room, and the others."""
    new, left = state.newcomers(), state.usable
    for worker in keep:
        left[worker.host] = left.get(worker.host, 0) - 1
    fitting = _within(sorted(new, key=lambda w: (w.ready_at is None, w.number)), left)
    if limits.max_np is not None:
        fitting = fitting[: max(0, limits.max_np - len(keep))]
    return fitting, [worker for worker in new if worker not in fitting]


def _joining(
    state: JobState, keep: Sequence[Process], new: Sequence[Process], limits: Limits
) -> list[Process]:
    """The new workers that get a place now."""
    since = [worker.ready_at for worker in new if worker.ready_at is not None]
    if not since:
        return []
    beginning = not keep
    patience = limits.start_timeout if beginning else SETTLE_SECONDS
    more_to_come = len(since) < len(new) or (beginning and state.connecting)
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
    elif state.failed or state.asked:
        kind = "failure"
    elif len(keep) < len(members) or state.left:
        kind = "mixed" if joining else "removed"
    else:
        kind = "added"
    joined = _seated(state, keep, joining)
    return Proposal(
        members=tuple(sorted([*keep, *joined], key=lambda w: w.age)),
        kind=kind,
        lost=(*state.failed, *state.finished),
        added=tuple(worker.number for worker in joined),
        min_np=limits.min_np,
    )


def _seated(state: JobState, keep: Sequence[Process], joining: Sequence[Process]) -> list[Process]:
    """Give workers that join the members `keep` their seats, host by host, and their slots.

    A worker takes the lowest slot that no member of its host has. Nearly always that is the slot in
    which it was started; it is a lower one if the worker there is late, or was lost meanwhile. Its
    first local rank is then its slot, because all lower slots are occupied: a script that chooses a
    GPU by it never chooses that of a member, whose slot is another one.
    """
    occupied: dict[str, set[int]] = {worker.host: set() for worker in joining}
    for worker in keep:
        occupied.setdefault(worker.host, set()).add(worker.index)
    free = {
        host: itertools.filterfalse(taken.__contains__, itertools.count())
        for host, taken in occupied.items()
    }
    slots = {w.number: next(free[w.host]) for w in sorted(joining, key=lambda w: w.index)}
    order = {host: position for position, host in enumerate(state.hosts)}
    ordered = sorted(joining, key=lambda w: (order.get(w.host, len(order)), w.number))
    return [
        dataclasses.replace(worker, joined=state.number + 1, seat=seat, index=slots[worker.number])
        for seat, worker in enumerate(ordered)
    ]


def _finish(state: JobState, limits: Limits) -> ElasticPlan:
    """The end is near."""
    if state.interrupted and state.too_few:
        return ElasticPlan(release=True)
    if state.number == 0 and not state.interrupted:
        return _begin_without(state, limits)
    return ElasticPlan(proposal=_shrink(state, _members(state)))


def _begin_without(state: JobState, limits: Limits) -> ElasticPlan:
    """Somebody has finished without ever meeting the others, who may still do so, or finish too.

    Those who come wait until all others have come or ended. Slots that were never used are filled.
    """
    start = _never_used(state, limits)
    more_to_come = state.connecting or any(worker.ready_at is None for worker in state.workers)
    if start or more_to_come or not state.workers:
        return ElasticPlan(tuple(start))
    return ElasticPlan(proposal=Proposal(tuple(_seated(state, [], state.workers)), "start"))


def _some_never_ran(state: JobState, limits: Limits) -> bool:
    """Whether those who have ended did so before others were even started, which still will be."""
    if state.number or not state.finishing or state.interrupted or state.no_hosts:
        return False
    return state.connecting or bool(_never_used(state, limits))


def _never_used(state: JobState, limits: Limits) -> list[str]:
    """Where workers can be started on slots that had none so far, before the first decision."""
    gone = [Process(-1, host) for host in state.ended_early]
    return _missing(dataclasses.replace(state, failures=[]), [], [*state.workers, *gone], limits)


def _shrink(state: JobState, members: Sequence[Process]) -> Proposal | None:
    """Without those that are gone; workers that only ended well are not missed until asked for."""
    if not members or not (state.failed or state.left or state.asked):
        return None
    lost = (*state.failed, *state.finished)
    kind = "failure" if state.failed or state.asked else "removed"
    return Proposal(tuple(members), kind, lost)


def _missing(
    state: JobState, keep: Sequence[Process], new: Sequence[Process], limits: Limits
) -> list[str]:
    """Where to start new workers: the first hosts with room."""
    if state.number == 0 and not state.workers and state.slots < limits.num_proc:
        return []
    if not keep and state.failures and any(worker.ready_at is None for worker in new):
        return []  # if those that start now all fail as well, it is of no use to go on
    room = {h: n for h, n in state.usable.items() if h not in state.resting}
    for worker in (*keep, *new):
        if worker.host in room:
            room[worker.host] -= 1
    wanted = sum(max(0, n) for n in room.values())
    if limits.max_np is not None:
        wanted = min(wanted, limits.max_np - len(keep) - len(new))
    found: list[str] = []
    for host, n in room.items():
        found += [host] * max(0, min(n, wanted - len(found)))
    return found
