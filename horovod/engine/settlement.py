"""Agreeing when queues differ: all ranks see all whole queues and reach the same verdict.

Used by a channel's round when the queues have no common beginning: ranks submitted in different
orders, the same name means different things, or somebody has joined. Slower than a round (it moves
descriptions, not signatures), and rarely needed twice in a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.executor import identity_like
from horovod.engine.request import Kind, Request
from horovod.transport.base import Group, Transport

_REDUCTIONS = (Kind.ALLREDUCE.value, Kind.BARRIER.value)  # what goes on while ranks have joined

_FIELDS = {  # what a mismatch message compares, in the order people want to know
    "dtypes": "dtype",
    "shapes": "shape",
    "device": "device",
    "op": "reduction",
    "prescale": "prescale factor",
    "postscale": "postscale factor",
    "root": "root rank",
    "detail": "ranks",
}

Entry = dict[str, Any]


@dataclass
class Settlement:
    """What a channel remembers between settlements, the same on all ranks."""

    joined: set[int] = field(default_factory=set)
    last_joined: int = -1


@dataclass
class Verdict:
    """What follows for this rank; `ready` runs on all ranks in the same order."""

    ready: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, HorovodInternalError]] = field(default_factory=list)
    completed: list[tuple[Request, Any]] = field(default_factory=list)


def settle(
    queue: Sequence[Request], group: Group, transport: Transport, memory: Settlement
) -> Verdict:
    """Exchange queues and decide. Collective over the group."""
    mine = [{"name": r.name, "signature": r.signature.hex(), **r.describe()} for r in queue]
    queues: list[dict[str, Entry]] = [
        {entry["name"]: entry for entry in json.loads(text)}
        for text in gather_texts(json.dumps(mine).encode(), transport)
    ]
    own = {request.name: request for request in queue}
    joined = {
        rank
        for rank, entries in enumerate(queues)
        if any(entry["kind"] == Kind.JOIN.value for entry in entries.values())
    }
    if joined - memory.joined:
        memory.last_joined = max(joined - memory.joined)
    memory.joined = joined
    verdict = Verdict()
    if len(joined) == group.size and all(len(entries) == 1 for entries in queues):
        (request,) = own.values()
        verdict.completed.append((request, group.global_ranks[memory.last_joined]))
        memory.joined = set()
        return verdict
    _sort_out(queues, own, joined, group, verdict)
    return verdict


def gather_texts(text: bytes, transport: Transport) -> list[bytes]:
    """Everybody's text."""
    size = transport.size
    lengths = torch.empty(size, dtype=torch.int64)
    transport.allgather(torch.tensor([len(text)]), lengths, [1] * size)
    counts: list[int] = lengths.tolist()
    output = torch.empty(sum(counts), dtype=torch.uint8)
    transport.allgather(torch.frombuffer(bytearray(text), dtype=torch.uint8), output, counts)
    data = output.numpy().tobytes()
    texts, start = [], 0
    for count in counts:
        texts.append(data[start : start + count])
        start += count
    return texts


def _sort_out(
    queues: Sequence[Mapping[str, Entry]],
    own: Mapping[str, Request],
    joined: set[int],
    group: Group,
    verdict: Verdict,
) -> None:
    """Decide on every name that all ranks have submitted, or joined without."""
    guide = min((rank for rank in range(group.size) if rank not in joined), default=0)
    names = dict(queues[guide])  # its order; then what only joined ranks still have
    for entries in queues:
        for name, entry in entries.items():
            names.setdefault(name, entry)
    for name, example in names.items():
        if example["kind"] == Kind.JOIN.value:
            continue
        holders = [rank for rank in range(group.size) if name in queues[rank]]
        absent = [rank for rank in range(group.size) if name not in queues[rank]]
        if not set(absent) <= joined:
            error = _crossed_kinds(name, queues, group)
            if error is not None:
                _fail_all(error, name.partition(".")[2], own, verdict)
            continue
        held = {rank: queues[rank][name] for rank in holders}
        error = None
        if len({entry["signature"] for entry in held.values()}) > 1:
            error = HorovodInternalError(_mismatch(name, held, group))
        elif absent and example["kind"] not in _REDUCTIONS:
            who = ", ".join(group.describe(rank) for rank in absent)
            error = HorovodInternalError(
                f"{name!r} cannot run: {who} has joined, and only allreduce and barrier go on "
                f"while a rank has joined"
            )
        request = own.get(name)
        if error is not None:
            if request is not None:
                verdict.failed.append((request, error))
        else:
            verdict.ready.append(request or _stand_in(name, example))


def _stand_in(name: str, entry: Entry) -> Request:
    """A request of a rank that has joined: it contributes what changes nothing."""
    op = ReduceOp(entry["op"])
    device = torch.device(entry["device"])  # of other kinds than "cpu": the current one
    tensors = []
    for dtype_name, shape in zip(entry["dtypes"], entry["shapes"], strict=True):
        dtype = getattr(torch, dtype_name)
        value = identity_like(dtype, op)
        tensors.append(torch.full(shape, value, dtype=dtype, device=device))
    return Request(
        None,  # type: ignore[arg-type]  # the channel adopts it
        Kind(entry["kind"]),
        name,
        bytes.fromhex(entry["signature"]),
        tensors,
        tensors,
        op,
        entry["prescale"],
        entry["postscale"],
    )


def _mismatch(name: str, entries: Mapping[int, Entry], group: Group) -> str:
    """Which field differs, and who has which value from which line of their code."""
    what, values = "request", {rank: e["signature"] for rank, e in entries.items()}
    for key, word in _FIELDS.items():
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
    return f"{name!r}: mismatched {what} between ranks: " + "; ".join(parts)


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


def _crossed_kinds(
    name: str, queues: Sequence[Mapping[str, Entry]], group: Group
) -> HorovodInternalError | None:
    """All ranks wait for the same user's name, but as different operations: that is a deadlock."""
    label = name.partition(".")[2]
    waited: dict[int, Entry] = {}
    for rank, entries in enumerate(queues):
        for other, entry in entries.items():
            if entry["waiting"] and other.partition(".")[2] == label:
                waited[rank] = entry
    if len(waited) < group.size:
        return None
    parts = [
        f"{entry['kind']} on rank {group.global_ranks[rank]} ({entry['source']})"
        for rank, entry in waited.items()
    ]
    return HorovodInternalError(
        f"{label!r}: mismatched operation between ranks: " + "; ".join(parts)
    )


def _fail_all(
    error: HorovodInternalError, label: str, own: Mapping[str, Request], verdict: Verdict
) -> None:
    already = {id(request) for request, _ in verdict.failed}
    for name, request in own.items():
        if name.partition(".")[2] == label and request.waiting and id(request) not in already:
            verdict.failed.append((request, error))
