"""Write one trace of all ranks, for Perfetto and chrome://tracing: ``horovod.timeline merge``.

Hosts are processes and ranks are threads. The first row of a rank is its program: steps, backward,
waits. Below are its collectives, each with the time until the ranks agreed and the operation
itself, in as few rows as possible. Arrows lead from the rank that submitted a collective last to
the ranks that waited for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.observe.timeline.clocks import align
from horovod.observe.timeline.files import BACKWARD, NEGOTIATE, STEP, WAIT, Event
from horovod.observe.timeline.matching import Match, match
from horovod.observe.timeline.recorder import shortened
from horovod.observe.timeline.recording import RecordedCollective, Recording, read_recordings

ROWS_OF_A_RANK = 1000  # its threads are numbered from rank * this
MOST_NAMES = 20  # names of a bucket's tensors that the arguments of a slice list


@dataclass
class TraceSlice:
    """A stretch of time in a row, with the stretches inside of it."""

    name: str
    began: int
    ended: int
    about: dict[str, Any] = field(default_factory=dict)
    inner: list[TraceSlice] = field(default_factory=list)


def merge(paths: Sequence[str], output: str) -> int:
    """Write the merged trace of the ranks' files.

    Args:
        paths: The files.
        output: The file to write.

    Returns:
        The number of ranks.

    Raises:
        ValueError: A file is not a timeline, or `output` is one of the files.
        OSError: A file cannot be read or written.
    """
    for path in paths:
        if os.path.realpath(path) == os.path.realpath(output):
            raise ValueError(f"{output} is both an input and the output: choose another output")
    recordings = align(read_recordings(paths))
    events = merged_events(recordings)
    separator = "[\n"
    with open(output, "w", encoding="utf-8") as file:
        for event in events:
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]\n")
    return len(recordings)


def merged_events(recordings: Sequence[Recording]) -> list[Event]:
    """Return the events of aligned recordings: names first, then by time."""
    hosts = list(dict.fromkeys(recording.host for recording in recordings))
    matches = match(recordings)
    match_of = {id(part): each for each in matches for part in each.parts.values()}
    names: list[Event] = []
    timed: list[Event] = []
    rows: dict[int, tuple[int, int, TraceSlice]] = {}  # pid, tid and slice of a collective
    for number, host in enumerate(hosts, 1):
        names.append(_metadata("process_name", number, 0, name=f"host {host}"))
        names.append(_metadata("process_sort_index", number, 0, sort_index=number))
    for recording in recordings:
        pid, tid = hosts.index(recording.host) + 1, recording.rank * ROWS_OF_A_RANK + 1
        program = arrange_rows(program_slices(recording), nested=True) or [[]]
        blocks = {id(c): collective_slice(c, recording, match_of) for c in recording.collectives}
        collectives = arrange_rows(list(blocks.values()), nested=False)
        name = f"rank {recording.rank}"
        titles = [name, *[f"{name}: program"] * (len(program) - 1)]
        titles += [f"{name}: collectives"] * len(collectives)
        thread_of = {}
        for offset, (title, lane) in enumerate(zip(titles, program + collectives, strict=True)):
            names.append(_metadata("thread_name", pid, tid + offset, name=title))
            names.append(_metadata("thread_sort_index", pid, tid + offset, sort_index=tid + offset))
            for each in lane:
                thread_of[id(each)] = tid + offset
                timed += _complete(each, pid, tid + offset)
        for key, block in blocks.items():
            rows[key] = (pid, thread_of[id(block)], block)
        for time in recording.cycles:
            mark = {"ph": "i", "name": "CYCLE_START", "s": "t", "ts": round(time)}
            timed.append({**mark, "pid": pid, "tid": tid})
    timed += arrows(matches, rows)
    # At the same time an outer slice comes before its inner ones, and arrows come last: a viewer
    # attaches an arrow to the slice around it.
    timed.sort(key=lambda event: (event["ts"], event["ph"] != "X", -event.get("dur", 0)))
    return names + timed


def program_slices(recording: Recording) -> list[TraceSlice]:
    """Return the slices of steps, backward passes and waits."""
    slices = []
    for what, rows in ((STEP, recording.steps), (BACKWARD, recording.backwards)):
        for row, spans in rows.items():
            for span in spans:
                name = f"step {span.number}" if what == STEP else what
                about = {"optimizer": row, "step": span.number}
                slices.append(TraceSlice(name, round(span.began), round(span.ended), about))
    for span in recording.waits:
        slices.append(TraceSlice(WAIT, round(span.began), round(span.ended), {"for": span.what}))
    return slices


def collective_slice(
    collective: RecordedCollective, recording: Recording, match_of: dict[int, Match]
) -> TraceSlice:
    """Return the slice of a collective, with its negotiation, execution and phases inside."""
    about = {key: value for key, value in collective.about.items() if key != "names"}
    if "names" in collective.about:
        about["tensors"] = shortened(collective.about["names"], MOST_NAMES)
    last = collective.agreed if collective.started is None else collective.started
    end = collective.ended
    if end is None:
        finished = collective.agreed is not None and collective.started is None
        end = last if finished and last is not None else max(recording.ended, collective.submitted)
        if not finished:
            about["unfinished"] = True  # when the recording ended
    title = collective.name if "unfinished" not in about else f"{collective.name} (unfinished)"
    began = round(collective.submitted)
    whole = TraceSlice(title, began, max(began, round(end)), about)
    agreed = whole.ended if collective.agreed is None else round(collective.agreed)
    if collective.started is None or collective.agreed is not None:
        negotiation = _inside(whole, NEGOTIATE + collective.kind, began, agreed)
        negotiation.about = _readiness(match_of.get(id(collective)))
        whole.inner.append(negotiation)
    if collective.started is not None:
        run = _inside(whole, collective.kind, round(collective.started), whole.ended)
        for phase in collective.phases:
            run.inner.append(_inside(run, phase.what, round(phase.began), round(phase.ended)))
        whole.inner.append(run)
    return whole


def _inside(outer: TraceSlice, name: str, began: int, ended: int) -> TraceSlice:
    """Return a slice that is cut off where it would leave `outer`."""
    began = min(max(began, outer.began), outer.ended)
    return TraceSlice(name, began, min(max(began, ended), outer.ended))


def _readiness(each: Match | None) -> dict[str, Any]:
    """Return when each rank submitted a collective, which explains a long negotiation."""
    if each is None or each.last_rank is None:
        return {}
    order = sorted(each.ready, key=lambda rank: each.ready[rank])
    first = each.ready[order[0]]
    shown = order if len(order) <= 8 else [*order[:4], *order[-4:]]
    told = [f"rank {rank} +{(each.ready[rank] - first) / 1000:.3f} ms" for rank in shown]
    later = round(each.lateness / 1000, 3)
    about = {"last rank": each.last_rank, "later than the others by ms": later}
    return {**about, "ready": ", ".join(told)}


def arrange_rows(slices: Sequence[TraceSlice], nested: bool) -> list[list[TraceSlice]]:
    """Arrange slices in as few rows as possible, so that no two of a row overlap.

    If `nested`, a slice may lie inside another of its row.
    """
    rows: list[list[TraceSlice]] = []
    stacks: list[list[int]] = []  # for each row, the ends of the slices that are open
    for each in sorted(slices, key=lambda one: (one.began, -one.ended)):
        number = 0
        while number < len(rows) and not _fits(each, stacks[number], nested):
            number += 1
        if number == len(rows):
            rows.append([])
            stacks.append([])
        rows[number].append(each)
        stacks[number].append(each.ended)
    return rows


def _fits(each: TraceSlice, stack: list[int], nested: bool) -> bool:
    """Return whether a slice fits into a row, and drop the slices of it that have ended."""
    while stack and stack[-1] <= each.began:
        stack.pop()
    return not stack or (nested and stack[-1] >= each.ended)


def arrows(matches: Sequence[Match], rows: dict[int, tuple[int, int, TraceSlice]]) -> list[Event]:
    """Return arrows from the rank that came last to the ranks that waited for it."""
    events: list[Event] = []
    for each in matches:
        last = each.last_rank
        if last not in each.parts:
            continue
        pid, tid, source = rows[id(each.parts[last])]
        for rank, part in each.parts.items():
            other_pid, other_tid, target = rows[id(part)]
            at = max(target.inner[-1].began, source.began)
            if rank == last or source.began == source.ended or at >= target.ended:
                continue
            common = {"name": "all ranks ready", "cat": "collective", "id": len(events) // 2 + 1}
            events.append({"ph": "s", **common, "ts": source.began, "pid": pid, "tid": tid})
            head = {"ts": at, "pid": other_pid, "tid": other_tid}
            events.append({"ph": "f", "bp": "e", **common, **head})
    return events


def _complete(each: TraceSlice, pid: int, tid: int) -> Iterator[Event]:
    """Yield the events of a slice and those inside of it."""
    event: Event = {"ph": "X", "name": each.name, "ts": each.began, "dur": each.ended - each.began}
    event |= {"pid": pid, "tid": tid}
    if each.about:
        event["args"] = each.about
    yield event
    for inner in each.inner:
        yield from _complete(inner, pid, tid)


def _metadata(what: str, pid: int, tid: int, **about: Any) -> Event:
    """Return an event that names or sorts a process or thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": about}
