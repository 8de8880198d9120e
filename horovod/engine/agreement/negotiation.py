"""Agreeing when queues differ: all ranks see all whole queues and reach the same outcome.

Used by a channel's round when the queues have no common beginning: ranks submitted in different
orders, the same name means different things, or somebody has joined. Slower than a round (it moves
descriptions, not signatures), and rarely needed twice in a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.agreement.deadlock import describe_deadlock, is_stuck
from horovod.engine.collective import Collective, Kind, LanePlan, Reduction
from horovod.engine.execution.scaling import identity_like
from horovod.engine.request import Request
from horovod.observe.statistics.compilations import difference_hint
from horovod.transport.base import Group, Transport

_REDUCTIONS = (
    Kind.ALLREDUCE.value,
    Kind.BARRIER.value,
    Kind.CONFIRM.value,
)  # the kinds that go on while ranks have joined

_FIELDS = {  # what a mismatch message compares, in the order people want to know
    "dtypes": "dtype",
    "shapes": "shape",
    "device": "device",
    "op": "reduction",
    "prescale_factor": "prescale factor",
    "postscale_factor": "postscale factor",
    "wire": "compression",
    "root_rank": "root rank",
    "change": "ranks",
    "plan": "gradients",
}

JOIN = f"{Kind.JOIN.value}.noname"

Queue = dict[str, tuple[str, bool]]  # name -> signature, and whether somebody waits for it
Entry = dict[str, Any]  # a request's description


class Finding(Enum):
    """What comparing the queues tells about a name."""

    READY = "all ranks have submitted it alike"
    STOOD_IN_FOR = "the others have joined"
    MISMATCHED = "ranks mean different things by it"
    CROSSED = "ranks wait for it as different operations"


@dataclass
class JoinState:
    """What a channel remembers between negotiations, the same on all ranks."""

    joined: set[int] = field(default_factory=set)
    last_joined: int = -1


@dataclass
class Negotiated:
    """What follows for this rank; `ready` runs on all ranks in the same order."""

    ready: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, HorovodInternalError]] = field(default_factory=list)
    completed: list[tuple[Request, Any]] = field(default_factory=list)
    join_ended: bool = False  # nobody is joined any more


def negotiate(
    queue: Sequence[Request], group: Group, transport: Transport, memory: JoinState
) -> Negotiated:
    """Exchange queues and decide. Collective over the group."""
    mine = [(request.name, request.signature.hex(), request.waiting) for request in queue]
    told = gather_json([is_stuck(queue), mine], transport)
    queues: list[Queue] = [
        {name: (signature, waiting) for name, signature, waiting in entries} for _, entries in told
    ]
    own = {request.name: request for request in queue}
    joined = {rank for rank, names in enumerate(queues) if JOIN in names}
    if joined - memory.joined:
        memory.last_joined = max(joined - memory.joined)
    memory.joined = joined
    if len(joined) == group.size and all(len(names) == 1 for names in queues):
        memory.joined = set()
        last = group.global_ranks[memory.last_joined]
        return Negotiated(completed=[(own[JOIN], last)], join_ended=True)
    findings = _compare(queues, joined)
    if not findings and all(stuck for stuck, _ in told):
        return _deadlock(queue, group, transport)
    obscure = {name for name, finding in findings.items() if finding is not Finding.READY}
    if not obscure:
        return Negotiated(ready=[own[name] for name in findings])
    described = {name: own[name].describe() for name in own if name in obscure}
    outcome = _judge(findings, gather_json(described, transport), own, group)
    if outcome.join_ended:
        memory.joined = set()
    return outcome


def _deadlock(queue: Sequence[Request], group: Group, transport: Transport) -> Negotiated:
    """Fail what ranks wait for, because none can ever submit anything else. Collective."""
    waited = [request for request in queue if request.waiting]
    waiting = gather_json({request.name: request.describe() for request in waited}, transport)
    error = HorovodInternalError(describe_deadlock(waiting, group))
    return Negotiated(failed=[(request, error) for request in waited])


def gather_json(value: Any, transport: Transport) -> list[Any]:
    """Return all ranks' values."""
    content = json.dumps(value).encode()
    return [json.loads(each) for each in transport.gather_bytes(content)]


def _compare(queues: Sequence[Queue], joined: set[int]) -> dict[str, Finding]:
    """Return a finding for every name that needs action, in execution order."""
    ranks = range(len(queues))
    guide = min((rank for rank in ranks if rank not in joined), default=0)
    names = dict(queues[guide])  # in the guide's order; then those of joined ranks alone
    for queue in queues:
        for name, entry in queue.items():
            names.setdefault(name, entry)
    crossed = _crossed_names(queues)
    findings: dict[str, Finding] = {}
    for name in names:
        if name == JOIN:
            continue
        holders = [queue[name] for queue in queues if name in queue]
        absent = {rank for rank in ranks if name not in queues[rank]}
        if not absent <= joined:
            if name in crossed:
                findings[name] = Finding.CROSSED
        elif len({signature for signature, _ in holders}) > 1:
            findings[name] = Finding.MISMATCHED
        else:
            findings[name] = Finding.STOOD_IN_FOR if absent else Finding.READY
    return findings


def _crossed_names(queues: Sequence[Queue]) -> set[str]:
    """Return names that all ranks wait for as different operations: nobody can ever go on."""
    waited = [
        {_label(name): name for name, (_, waiting) in queue.items() if waiting} for queue in queues
    ]
    common = set(waited[0]).intersection(*waited[1:])
    return {names[label] for label in common for names in waited}


def _judge(
    findings: Mapping[str, Finding],
    descriptions: Sequence[Mapping[str, Entry]],
    own: Mapping[str, Request],
    group: Group,
) -> Negotiated:
    outcome = Negotiated()
    for name, finding in findings.items():
        request = own.get(name)
        entries = {rank: known[name] for rank, known in enumerate(descriptions) if name in known}
        is_stood_in_for = finding is Finding.STOOD_IN_FOR
        if finding is Finding.READY or (is_stood_in_for and _kind(name) in _REDUCTIONS):
            outcome.ready.append(request or _stand_in(name, next(iter(entries.values()))))
            continue
        if is_stood_in_for and _kind(name) == Kind.REQUIRE_ALL.value:
            missed = HorovodInternalError(_missed(entries, group))
            outcome.failed.append((request or own[JOIN], missed))
            outcome.join_ended = True
            continue
        if request is None:
            continue
        if finding is Finding.MISMATCHED:
            message = _mismatch(name, entries, group)
        elif finding is Finding.CROSSED:
            message = _crossing(_label(name), descriptions, group)
        else:
            message = (
                f"{name!r} cannot run: {_absent(entries, group)} has joined, and only allreduce "
                f"and barrier go on while a rank has joined"
            )
        outcome.failed.append((request, HorovodInternalError(message)))
    return outcome


def _kind(name: str) -> str:
    return name.partition(".")[0]


def _label(name: str) -> str:
    """Return the user's part of a name on the wire."""
    return name.partition(".")[2]


def _stand_in(name: str, entry: Entry) -> Request:
    """Return a request for a rank that has joined, with tensors that change no result."""
    if entry["plan"] is not None:  # a comparison, on a lane of the same name
        dtypes, counts = entry["plan"]
        plan = LanePlan(tuple(dtypes), tuple(counts))
        return Request(None, Collective(Kind.CONFIRM, _label(name), plan=plan), name, b"")
    reduction = Reduction(
        ReduceOp(entry["op"]),
        entry["prescale_factor"],
        entry["postscale_factor"],
        None if entry["wire"] is None else getattr(torch, entry["wire"]),
    )
    device = torch.device(entry["device"])  # of other kinds than "cpu": the current one
    tensors = []
    for dtype_name, shape in zip(entry["dtypes"], entry["shapes"], strict=True):
        dtype = getattr(torch, dtype_name)
        value = identity_like(dtype, reduction.op)
        tensors.append(torch.full(shape, value, dtype=dtype, device=device))
    request = Request(
        None,  # nobody waits for it
        Collective(Kind(entry["kind"]), _label(name), reduction=reduction),
        name,
        b"",  # never compared: it has been agreed on
        tensors,
        tensors,
        is_exclusive=entry["is_exclusive"],
    )
    request.follow_stream()  # on which the device fills the tensors
    return request


def _absent(entries: Mapping[int, Entry], group: Group) -> str:
    return ", ".join(group.describe(rank) for rank in range(group.size) if rank not in entries)


def _missed(entries: Mapping[int, Entry], group: Group) -> str:
    """Return who has joined and must not have: all ranks raise that."""
    rank, entry = next(iter(entries.items()))
    return (
        f"{_absent(entries, group)} has joined, and {group.describe(rank)} cannot go on without "
        f"({entry['source']}): {entry['reason']}"
    )


def _mismatch(name: str, entries: Mapping[int, Entry], group: Group) -> str:
    """Return which field differs, and who has which value from which line of their code."""
    what, values = "request", {rank: str(entry) for rank, entry in entries.items()}
    if len({_labelled(entry) for entry in entries.values()}) > 1:
        what, values = "tree", _differing_labels(entries)
    for key, word in _FIELDS.items() if what != "tree" else ():
        shown = {rank: _shown(key, entry) for rank, entry in entries.items()}
        if len(set(shown.values())) > 1:
            what, values = word, shown
            break
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    parts = []
    for value, ranks in groups.items():
        who = ", ".join(str(group.global_ranks[rank]) for rank in ranks[:6])
        more = " ..." if len(ranks) > 6 else ""
        parts.append(f"{value} on rank {who}{more} ({entries[ranks[0]]['source']})")
    counts = {group.global_ranks[rank]: entry["graphs"] for rank, entry in entries.items()}
    differing = f"{name!r}: mismatched {what} between ranks: {'; '.join(parts)}"
    return differing + difference_hint(counts)


def _labelled(entry: Entry) -> tuple[str, ...]:
    """Return label, type and shape of each tensor, if the user has names for the tensors."""
    if not entry["labels"]:
        return ()
    if len(entry["labels"]) != len(entry["dtypes"]):  # packed: the labels say all
        return tuple(entry["labels"])
    forms = zip(entry["labels"], entry["dtypes"], entry["shapes"], strict=True)
    if entry["kind"] in (Kind.ALLGATHER.value, Kind.ALLTOALL.value):
        return tuple(f"{label} {dtype}{[None, *shape[1:]]}" for label, dtype, shape in forms)
    return tuple(f"{label} {dtype}{shape}" for label, dtype, shape in forms)


def _differing_labels(entries: Mapping[int, Entry]) -> dict[int, str]:
    """Return for each rank the labelled tensors that not all ranks have, or have in this order."""
    own = {rank: _labelled(entry) for rank, entry in entries.items()}
    common = set.intersection(*(set(labels) for labels in own.values()))
    if all(set(labels) == common for labels in own.values()):
        common = set()  # the same in another order
    shown = {}
    for rank, labels in own.items():
        others = [label for label in labels if label not in common]
        more = f" and {len(others) - 6} more" if len(others) > 6 else ""
        shown[rank] = (", ".join(others[:6]) or "none of these") + more
    return shown


def _shown(key: str, entry: Entry) -> str:
    value = entry[key]
    if key == "op":
        return ReduceOp(value).name.capitalize()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if key == "shapes" and entry["kind"] in (Kind.ALLGATHER.value, Kind.ALLTOALL.value):
        value = json.dumps(value)
        return f"{value} (the first dimension may differ)"
    return str(value)


def _crossing(label: str, descriptions: Sequence[Mapping[str, Entry]], group: Group) -> str:
    parts, counts = [], {}
    for rank, known in enumerate(descriptions):
        entry = next(entry for name, entry in known.items() if _label(name) == label)
        parts.append(f"{entry['kind']} on rank {group.global_ranks[rank]} ({entry['source']})")
        counts[group.global_ranks[rank]] = entry["graphs"]
    differing = f"{label!r}: mismatched operation between ranks: {'; '.join(parts)}"
    return differing + difference_hint(counts)
