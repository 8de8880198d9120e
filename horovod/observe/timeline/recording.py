"""Interpret the events that one rank recorded as collectives, waits and steps.

All modules that read files use it. Times are microseconds on the rank's own clock until `clocks`
has put them on one clock for the job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from horovod.observe.timeline.files import BACKWARD, NEGOTIATE, START_TIME, STEP, WAIT, Event, load

Otherwise = TypeVar("Otherwise", int, None)
Key = tuple[int, int, str]  # process set, number in it, name: one collective on all its ranks

DEVICES = ("NCCL", "XCCL")  # transports whose collectives run on a device, by its clock


@dataclass
class TimeSpan:
    """A stretch of time of the program, or of a collective."""

    began: float
    ended: float
    number: int = 0  # the number of the step
    what: str = ""  # what the program waits for, or what a collective does in this phase
    ran: float | None = None  # how long the step's thread had a core; None where unknown
    starved: float | None = None  # how long it was ready to run and had none


@dataclass
class RecordedCollective:
    """One collective, as one rank saw it."""

    name: str  # e.g. "allreduce.loss"
    kind: str  # e.g. "ALLREDUCE"
    key: Key
    submitted: float
    agreed: float | None = None  # when all ranks had agreed to run it
    started: float | None = None  # None for barriers in upstream's files
    ended: float | None = None
    phases: list[TimeSpan] = field(default_factory=list)  # e.g. copying to the fusion buffer
    ready: dict[int, float] = field(default_factory=dict)  # when each rank had submitted it
    about: dict[str, Any] = field(default_factory=dict)  # dtype, shape, count, bytes, tensors

    @property
    def is_direct(self) -> bool:
        """Whether a device began it without an agreement, and waited for other ranks inside of it.

        Only collectives on which ranks agreed have a number.
        """
        return self.key[0] < 0 and any(phase.what.startswith(DEVICES) for phase in self.phases)

    @property
    def met(self) -> float | None:
        """A moment that came at about the same time on all ranks, after all had submitted."""
        return self.ended if self.is_direct else self.agreed

    @property
    def nbytes(self) -> int | None:
        """Bytes of the tensors, if known."""
        if isinstance(self.about.get("bytes"), int):
            return int(self.about["bytes"])
        return bytes_of(self.about.get("dtype"), self.about.get("shape"))


@dataclass
class Recording:
    """One rank's file."""

    path: str
    rank: int
    host: str
    started: int  # microseconds since the epoch, by the host's clock
    clock: int | None  # the host's monotonic clock at that time
    size: int | None = None
    version: int = 1
    cores: frozenset[int] = frozenset()  # on which the rank may run; empty where unknown
    fusion_threshold: int | None = None  # bytes
    collectives: list[RecordedCollective] = field(default_factory=list)
    waits: list[TimeSpan] = field(default_factory=list)
    steps: dict[str, list[TimeSpan]] = field(default_factory=dict)  # by the name of the optimizer
    backwards: dict[str, list[TimeSpan]] = field(default_factory=dict)
    cycles: list[float] = field(default_factory=list)
    tensors: dict[str, list[str]] = field(default_factory=dict)  # by row, for groups
    ended: float = 0.0  # the last time in the file

    @property
    def start(self) -> int:
        """The time at which it began, on the clock of its host if that is known."""
        return self.started if self.clock is None else self.clock


def read_recordings(paths: Sequence[str]) -> list[Recording]:
    """Return the recordings in these files, in rank order.

    Raises:
        ValueError: A file is not a timeline, or two files are of one rank.
        OSError: A file cannot be read.
    """
    recordings: dict[int, Recording] = {}
    for position, path in enumerate(paths):
        recording = interpret(load(path), path, position)
        other = recordings.get(recording.rank)
        if other is not None:
            raise ValueError(
                f"{other.path} and {path} are both of rank {recording.rank}: leave one out"
            )
        recordings[recording.rank] = recording
    if not recordings:
        raise ValueError("no timeline: name at least one file")
    return [recordings[rank] for rank in sorted(recordings)]


def interpret(events: Sequence[Event], path: str = "", position: int = 0) -> Recording:
    """Return what one rank's events mean.

    Args:
        events: The events.
        path: Their file, for messages, and because its name may have the rank.
        position: The rank if neither the events nor the name of the file have it.

    Raises:
        ValueError: The events are not those of one rank.
    """
    about = _origin(events)
    if about is None:
        hint = "it was merged already" if _is_merged(events) else "it was not written by Horovod"
        raise ValueError(f"{path} has no {START_TIME}: {hint}; name the files of the ranks")
    rank = _number(about.get("rank"), rank_in_name(path, position))
    recording = Recording(
        path=path,
        rank=rank,
        host=str(about.get("host") or f"host of rank {rank}"),
        started=_number(about[START_TIME], 0),
        clock=_number(about.get("clock"), None),
        size=_number(about.get("size"), None),
        version=_number(about.get("version"), 1),
        cores=_cores(about.get("cores")),
        fusion_threshold=_number(about.get("fusion_threshold"), None),
    )
    rows = _rows(events, recording)
    reader = _Reader(recording)
    for event in events:
        if _is_timed(event):
            ended = float(event["ts"]) + float(event.get("dur") or 0)
            recording.ended = max(recording.ended, ended)
            reader.take(event, rows.get(event.get("pid", 0), ""))
    _number_by_occurrence(recording.collectives)
    return recording


class _Reader:
    """Follows the nested events of every row."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._open: dict[str, RecordedCollective] = {}  # by row
        self._last: dict[str, RecordedCollective] = {}  # by row
        self._numbered: dict[tuple[str, int], RecordedCollective] = {}
        self._phases: dict[str, list[TimeSpan | None]] = {}  # what is open in each row

    def take(self, event: Event, row: str) -> None:
        """Take the next event of a row."""
        phase, time = event.get("ph"), float(event["ts"])
        if phase == "B":
            self._begin(row, str(event.get("name", "")), time)
        elif phase == "E":
            self._end(row, time, event.get("args"))
        elif phase == "X":
            self._span(row, event, time)
        elif phase in ("i", "I") and event.get("name") == "CYCLE_START":
            self.recording.cycles.append(time)

    def _begin(self, row: str, what: str, time: float) -> None:
        """Begin a negotiation, a collective or a phase of it."""
        stack = self._phases.setdefault(row, [])
        if what.startswith(NEGOTIATE):
            stack.clear()  # what an aborted collective left open
            self._new(row, what.removeprefix(NEGOTIATE), time)
            stack.append(None)
            return
        current = self._open.get(row)
        if not stack and (current is None or current.agreed is None):
            current = self._new(row, what, time)  # recording began after its negotiation
        if not stack:
            assert current is not None
            current.started = time
            stack.append(None)
            return
        part = TimeSpan(time, time, what=what)
        stack.append(part)
        if current is not None:
            current.phases.append(part)

    def _new(self, row: str, kind: str, time: float) -> RecordedCollective:
        """Add a collective that was submitted at `time`."""
        collective = RecordedCollective(row, kind, (0, -1, row), time)
        self._open[row] = self._last[row] = collective
        self.recording.collectives.append(collective)
        if row in self.recording.tensors:
            collective.about["names"] = self.recording.tensors[row]
        return collective

    def _end(self, row: str, time: float, about: Any) -> None:
        """End what was begun last in a row."""
        stack, current = self._phases.get(row), self._open.get(row)
        if not stack or current is None:
            return  # its beginning was not recorded
        part = stack.pop()
        if part is not None:
            part.ended = time
        elif current.started is None:
            current.agreed = time
            if isinstance(about, dict) and "number" in about:
                number = _number(about["number"], -1)
                current.key = (_number(about.get("set"), 0), number, row)
                self._numbered[row, number] = current
        else:
            current.ended = time
            if isinstance(about, dict):
                current.about.update(about)
            del self._open[row]

    def _span(self, row: str, event: Event, time: float) -> None:
        """Take an event that has a duration: a wait, a step, or when a rank had submitted."""
        name, duration = str(event.get("name", "")), float(event.get("dur") or 0)
        about = event.get("args") if isinstance(event.get("args"), dict) else {}
        assert isinstance(about, dict)
        if name == WAIT:
            what = str(about.get("for", ""))
            self.recording.waits.append(TimeSpan(time, time + duration, what=what))
        elif name in (STEP, BACKWARD):
            spans = self.recording.steps if name == STEP else self.recording.backwards
            number = _number(about.get("step"), 0)
            ran, starved = (_number(about.get(key), None) for key in ("ran", "starved"))
            span = TimeSpan(time, time + duration, number, ran=ran, starved=starved)
            spans.setdefault(row, []).append(span)
        elif name.isdigit():
            last = self._last.get(row)
            if "number" in about:  # it was written later, when the name may be in use again
                last = self._numbered.get((row, _number(about["number"], -1)))
            if last is not None:
                last.ready.setdefault(int(name), time)


def _origin(events: Iterable[Event]) -> dict[str, Any] | None:
    """Return the arguments of the event that says when, and since 0.29 by which rank, it began."""
    for event in events:
        about = event.get("args")
        if isinstance(about, dict) and START_TIME in about:
            return about
    return None


def _is_merged(events: Iterable[Event]) -> bool:
    """Return whether `merging` has written these events."""
    return any(event.get("name") == "thread_name" for event in events)


def _rows(events: Iterable[Event], recording: Recording) -> dict[Any, str]:
    """Return the names of the rows, which upstream's format calls processes."""
    rows = {}
    for event in events:
        about = event.get("args")
        if event.get("name") == "process_name" and isinstance(about, dict) and "name" in about:
            name = rows[event.get("pid", 0)] = str(about["name"])
            if isinstance(about.get("tensors"), list):
                recording.tensors[name] = [str(each) for each in about["tensors"]]
    return rows


def _is_timed(event: Event) -> bool:
    """Return whether an event has a time."""
    stamp = event.get("ts")
    return isinstance(stamp, (int, float)) and not isinstance(stamp, bool)


def _number(value: Any, otherwise: Otherwise) -> int | Otherwise:
    """Return a whole number; `otherwise` if the value is no number."""
    return int(value) if isinstance(value, (int, float)) else otherwise


def _cores(value: Any) -> frozenset[int]:
    """Return the numbers of cores, or nothing if the value is not a list of them."""
    if not isinstance(value, list):
        return frozenset()
    return frozenset(core for core in value if isinstance(core, int))


def _number_by_occurrence(collectives: Iterable[RecordedCollective]) -> None:
    """Number collectives in files without numbers: the k-th of a name is the same on all ranks."""
    seen: dict[str, int] = {}
    for each in collectives:
        count = seen[each.name] = seen.get(each.name, 0) + 1
        if each.key[1] < 0 and each.agreed is not None:
            each.key = (-1, count, each.name)


def rank_in_name(path: str, otherwise: int) -> int:
    """Return the rank in a name such as run.rank7.json, or `otherwise` if there is none."""
    match = re.search(r"\.rank(\d+)(\.[^.]*)?$", os.path.basename(path))
    return int(match[1]) if match else otherwise


_SIZES = {"bool": 1, "bfloat16": 2, "half": 2, "float": 4, "double": 8, "int": 4, "long": 8}


def bytes_of(dtype: Any, shape: Any) -> int | None:
    """Return the bytes of a tensor that is described by texts like "float32" and "[2, 3]"."""
    if not isinstance(dtype, str) or not isinstance(shape, str):
        return None
    digits = re.search(r"(\d+)$", dtype)
    if dtype in _SIZES:
        size = _SIZES[dtype]
    elif digits:
        size = int(digits[1]) // 8
    else:
        return None
    for extent in re.findall(r"\d+", shape):
        size *= int(extent)
    return size
