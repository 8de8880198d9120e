"""What an elastic job does next: pure functions from what is known to what is to be done.

The driver describes the job as a `View` whenever something has happened, and executes the
`ElasticPlan`. Nothing here looks at a clock, a host or a process. Whether it is the end is in
`termination`, and comes first.

The rules, in the order in which they matter:

- Survivors keep their processes and their state; the oldest becomes rank 0. Who dies is taken out
  of the job by a decision at once; whoever replaces it joins by a later one, when its process has
  started and waits for a place, so that nobody waits for imports.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.decisions import Assignment
from horovod.runner.elastic import termination
from horovod.runner.elastic.view import Limits, View, WorkerView
from horovod.runner.slots.hosts import Host, plan_slots

SETTLE_SECONDS = 1.0
"""For how long new workers that are ready wait for others that are still starting, so that one
decision may take in all of them."""


@dataclass(frozen=True)
class Proposal:
    """The next decision, without its number and words."""

    members: tuple[WorkerView, ...]  # oldest first
    kind: str
    lost: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
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
    short_since: float | None = None  # to be remembered for the next view


def make_plan(view: View, limits: Limits) -> ElasticPlan:
    """The next step."""
    ending = termination.find_ending(view, limits)
    if ending is not None and not _some_never_ran(view, limits):
        return ElasticPlan(ending=ending)
    if view.over:
        return _finish(view, limits)
    begin_anew = termination.all_lost(view)
    if begin_anew:
        view = dataclasses.replace(view, failures=())
    members = _members(view)
    keep = _keep(view, members, limits)
    new, superfluous = _fitting(view, _newcomers(view), keep, limits)
    forced = bool(view.failed or view.left or len(keep) < len(members))
    if not keep:
        forced = False  # nobody is there to be told
    spent = limits.reset_limit is not None and view.number > limits.reset_limit
    joining = [] if spent and keep else _joining(view, keep, new, limits)
    proposal = None
    if forced or view.asked or joining:
        if spent:
            return ElasticPlan(ending=termination.exhausted(view, limits))
        proposal = _propose(view, members, keep, joining, limits)
    return ElasticPlan(
        tuple(_missing(view, keep, new, limits)),
        tuple(worker.id for worker in superfluous),
        proposal,
        begin_anew=begin_anew,
        short_since=termination.short_since(view, limits),
    )


def expect(view: View, limits: Limits) -> dict[int, Assignment]:
    """The places that workers will have if all that are there, or can be started, come to meet."""
    keep = _keep(view, _members(view), limits)
    new, _ = _fitting(view, _newcomers(view), keep, limits)
    ready_hosts = dataclasses.replace(view, resting=frozenset(), failures=())
    more = _missing(ready_hosts, keep, new, limits)
    last = max((worker.id for worker in view.workers), default=0)
    new += [WorkerView(last + 1 + index, host) for index, host in enumerate(more)]
    return arrange([*keep, *_seated(view, new)])


def arrange(members: Iterable[WorkerView]) -> dict[int, Assignment]:
    """Places for workers: the oldest is rank 0, the ranks of a host are neighbours."""
    by_host: dict[str, list[WorkerView]] = {}
    for worker in sorted(members, key=lambda w: w.age):
        by_host.setdefault(worker.host, []).append(worker)
    hosts = [Host(name, len(workers)) for name, workers in by_host.items()]
    ordered = [worker for workers in by_host.values() for worker in workers]
    places = plan_slots(hosts, len(ordered))
    return {
        worker.id: Assignment(**dataclasses.asdict(place))
        for worker, place in zip(ordered, places, strict=True)
    }


def _members(view: View) -> list[WorkerView]:
    return sorted((w for w in view.workers if w.placed), key=lambda w: w.age)


def _newcomers(view: View) -> list[WorkerView]:
    return [worker for worker in view.workers if worker.joined is None]


def _keep(view: View, members: Sequence[WorkerView], limits: Limits) -> list[WorkerView]:
    """The members that stay."""
    sound = _within(members, view.usable)
    tolerated = _within(members, view.hosts)
    stay = sound if len(sound) >= limits.min_np else tolerated
    if any(view.formed or worker.joined != view.number for worker in stay):
        return stay
    return list(members)  # somebody has to hand the state over first


def _within(workers: Sequence[WorkerView], room: Mapping[str, int]) -> list[WorkerView]:
    """As many workers of each host as it has room for, in the order given."""
    left = dict(room)
    stay = []
    for worker in workers:
        if left.get(worker.host, 0) > 0:
            left[worker.host] -= 1
            stay.append(worker)
    return stay


def _fitting(
    view: View, new: Sequence[WorkerView], keep: Sequence[WorkerView], limits: Limits
) -> tuple[list[WorkerView], list[WorkerView]]:
    """New workers for whom there is room, and the others."""
    left = view.usable
    for worker in keep:
        left[worker.host] = left.get(worker.host, 0) - 1
    fitting = _within(sorted(new, key=lambda w: (w.ready_at is None, w.id)), left)
    if limits.max_np is not None:
        fitting = fitting[: max(0, limits.max_np - len(keep))]
    return fitting, [worker for worker in new if worker not in fitting]


def _joining(
    view: View, keep: Sequence[WorkerView], new: Sequence[WorkerView], limits: Limits
) -> list[WorkerView]:
    """The new workers that get a place now."""
    since = [worker.ready_at for worker in new if worker.ready_at is not None]
    if not since:
        return []
    beginning = not keep
    patience = limits.start_timeout if beginning else SETTLE_SECONDS
    more_to_come = len(since) < len(new) or (beginning and view.connecting)
    if more_to_come and view.now < min(since) + patience:
        return []
    if len(keep) + len(since) < limits.min_np or (beginning and view.now < view.fenced_until):
        return []
    return [worker for worker in new if worker.ready_at is not None]


def _propose(
    view: View,
    members: Sequence[WorkerView],
    keep: Sequence[WorkerView],
    joining: Sequence[WorkerView],
    limits: Limits,
) -> Proposal:
    staying = {worker.id for worker in keep}
    removed = tuple(worker.id for worker in members if worker.id not in staying)
    if not keep:
        kind = "start"
    elif view.failed or view.asked:
        kind = "failure"
    elif removed or view.left:
        kind = "mixed" if joining else "removed"
    else:
        kind = "added"
    joined = _seated(view, joining)
    return Proposal(
        members=tuple(sorted([*keep, *joined], key=lambda w: w.age)),
        kind=kind,
        lost=(*view.failed, *view.finished),
        added=tuple(worker.id for worker in joined),
        removed=removed,
        min_np=limits.min_np,
    )


def _seated(view: View, joining: Sequence[WorkerView]) -> list[WorkerView]:
    """Workers with their seats in the next decision: host by host."""
    order = {host: index for index, host in enumerate(view.hosts)}
    ordered = sorted(joining, key=lambda w: (order.get(w.host, len(order)), w.id))
    return [
        dataclasses.replace(worker, joined=view.number + 1, seat=seat)
        for seat, worker in enumerate(ordered)
    ]


def _finish(view: View, limits: Limits) -> ElasticPlan:
    """The end is near."""
    if view.interrupted and view.too_few:
        return ElasticPlan(release=True)
    if view.number == 0 and not view.interrupted:
        return _begin_without(view, limits)
    return ElasticPlan(proposal=_shrink(view, _members(view)))


def _begin_without(view: View, limits: Limits) -> ElasticPlan:
    """Somebody has finished without ever meeting the others, who may still do so, or finish too.

    Those who come wait until all others have come or ended. Slots that were never used are filled.
    """
    start = _never_used(view, limits)
    more_to_come = view.connecting or any(worker.ready_at is None for worker in view.workers)
    if start or more_to_come or not view.workers:
        return ElasticPlan(tuple(start))
    return ElasticPlan(proposal=Proposal(tuple(_seated(view, view.workers)), "start"))


def _some_never_ran(view: View, limits: Limits) -> bool:
    """Whether those who have ended did so before others were even started, which still will be."""
    if view.number or not view.finishing or view.interrupted or view.no_hosts:
        return False
    return view.connecting or bool(_never_used(view, limits))


def _never_used(view: View, limits: Limits) -> list[str]:
    """Where workers can be started on slots that had none so far, before the first decision."""
    gone = [WorkerView(-1, host) for host in view.ended_early]
    return _missing(dataclasses.replace(view, failures=()), [], [*view.workers, *gone], limits)


def _shrink(view: View, members: Sequence[WorkerView]) -> Proposal | None:
    """Without those that are gone; workers that only ended well are not missed until asked for."""
    if not members or not (view.failed or view.left or view.asked):
        return None
    lost = (*view.failed, *view.finished)
    kind = "failure" if view.failed or view.asked else "removed"
    return Proposal(tuple(members), kind, lost)


def _missing(
    view: View, keep: Sequence[WorkerView], new: Sequence[WorkerView], limits: Limits
) -> list[str]:
    """Where to start new workers: the first hosts with room."""
    if view.number == 0 and not view.workers and view.slots < limits.num_proc:
        return []
    if not keep and view.failures and any(worker.ready_at is None for worker in new):
        return []  # if those that start now all fail as well, it is of no use to go on
    room = {h: n for h, n in view.usable.items() if h not in view.resting}
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
