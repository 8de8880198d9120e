"""The timeline: what every tensor did and when, as a trace that Chrome and Perfetto open.

The engine owns at most one `Timeline` and calls it around negotiation, execution and the
activities within. Every rank writes its own file; `merge`, also a command
(``python -m horovod.engine.timeline merge OUT FILE...``), puts the files on one clock.

A file is one JSON array with one event per line, in upstream's event shapes: first a metadata
record with the start time, then every tensor as a "process" whose rows hold nested begin ("B")
and end ("E") events. It is complete after each event, so a killed rank leaves a loadable file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

from horovod.common.logging import get_logger

log = get_logger(__name__)

CLOSING = b"\n]\n"
PAGE = 4096
START_TIME = "start_time_since_epoch_in_micros"

Event = dict[str, Any]


class Timeline:
    """Writes one rank's trace. Any thread may call; nothing here ever raises into training."""

    def __init__(self, path: str, rank: int, mark_cycles: bool = False) -> None:
        self.path = path_of_rank(path, rank)
        self.mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        self._descriptor: int | None = None
        self._reported = False
        self._end = 0  # where the closing bracket stands, and the next event goes
        self._separator = b"[\n"
        self._started = time.perf_counter_ns()
        epoch = time.time_ns() // 1000
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            self._report(error)
            return
        with self._lock:
            self._write(metadata("process_name", 0, **{START_TIME: epoch, "rank": rank}))
            self._write(metadata("process_sort_index", 0, sort_index=0))

    # -- what happens to a tensor ------------------------------------------------------------

    def negotiate_start(self, name: str, kind: str) -> None:
        """The tensor was submitted here; agreement with the other ranks begins."""
        self._begin(name, f"NEGOTIATE_{kind.upper()}")

    def rank_ready(self, name: str, rank: int) -> None:
        """That rank was seen to have submitted the tensor."""
        self._event(name, f'"ph": "X", "name": "{rank}", "dur": 0')

    def negotiate_end(self, name: str, kind: str) -> None:
        """All ranks agreed. `kind` must be that of `negotiate_start`; the format omits it."""
        self._event(name, '"ph": "E"')

    def start(self, name: str, kind: str) -> None:
        """The collective itself begins."""
        self._begin(name, kind.upper())

    def activity(self, name: str, activity: str) -> Activity:
        """A phase of the collective, as a context manager."""
        return Activity(self, name, activity)

    def activity_start(self, name: str, activity: str) -> None:
        self._begin(name, activity)

    def activity_end(self, name: str) -> None:
        self._event(name, '"ph": "E"')

    def end(self, name: str, dtype: object = None, shape: Sequence[int] | None = None) -> None:
        """The collective is over; `dtype` and `shape` describe its result where there is one."""
        if dtype is None or shape is None:
            self._event(name, '"ph": "E"')
            return
        described = f"[{', '.join(map(str, shape))}]"
        text = quoted(str(dtype).removeprefix("torch."))
        self._event(name, f'"ph": "E", "args": {{"dtype": {text}, "shape": "{described}"}}')

    def mark_cycle(self) -> None:
        """A round of the engine begins. Recorded only when cycles were asked for."""
        if not self.mark_cycles:
            return
        with self._lock:
            stamp = self._now()
            self._write(f'{{"ph": "i", "name": "CYCLE_START", "ts": {stamp}, "pid": 0, "s": "g"}}')

    def close(self) -> None:
        """Stop recording. The file is complete already; later events are dropped."""
        with self._lock:
            self._release()

    # -- writing -----------------------------------------------------------------------------

    def _begin(self, name: str, what: str) -> None:
        self._event(name, f'"ph": "B", "name": {quoted(what)}')

    def _event(self, name: str, body: str) -> None:
        with self._lock:
            if self._descriptor is None:
                return
            pid = self._pids.get(name)
            if pid is None:
                pid = self._pids[name] = len(self._pids) + 1
                self._write(metadata("process_name", pid, name=name))
                self._write(metadata("process_sort_index", pid, sort_index=pid))
            self._write(f'{{{body}, "ts": {self._now()}, "pid": {pid}}}')

    def _now(self) -> int:
        return (time.perf_counter_ns() - self._started) // 1000

    def _write(self, event: str) -> None:
        """Append one event, replacing the closing bracket, in one system call."""
        if self._descriptor is None:
            return
        data = self._separator + event.encode("ascii") + CLOSING
        # A kill can cut a write only between two pages. Blanks move an event that would straddle
        # them onto the next page: a cut then costs the bracket, which viewers do not require,
        # and never leaves half an event.
        room = PAGE - self._end % PAGE
        if len(data) > room:
            data = b" " * room + data
        try:
            written = os.pwrite(self._descriptor, data, self._end)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
        except OSError as error:
            self._report(error)
            self._cut_back()
            return
        self._end += len(data) - len(CLOSING)
        self._separator = b",\n"

    def _cut_back(self) -> None:
        """Drop a half-written event, so that what was recorded before stays readable."""
        assert self._descriptor is not None
        try:
            os.ftruncate(self._descriptor, self._end)
            os.pwrite(self._descriptor, CLOSING, self._end)
        except OSError:
            pass  # already reported: the same disk refused a moment ago
        self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.close(descriptor)
            except OSError as error:
                self._report(error)

    def _report(self, error: OSError) -> None:
        if self._reported:
            return
        self._reported = True
        log.warning(
            "The timeline stops here: %s could not be written (%s). Training goes on; to record "
            "one, name a file in an existing folder with free space.",
            self.path,
            error.strerror or error,
        )


class Activity:
    """Brackets one activity; a plain class, as generators cost more than the events do."""

    __slots__ = ("_activity", "_name", "_timeline")

    def __init__(self, timeline: Timeline, name: str, activity: str) -> None:
        self._timeline = timeline
        self._name = name
        self._activity = activity

    def __enter__(self) -> None:
        self._timeline.activity_start(self._name, self._activity)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timeline.activity_end(self._name)


def path_of_rank(path: str, rank: int) -> str:
    """Rank 0 writes `path` itself, as upstream does; rank 3 of run.json writes run.rank3.json."""
    if rank == 0:
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}.rank{rank}{suffix}"


def metadata(what: str, pid: int, **arguments: object) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": pid, "args": arguments})


@lru_cache(maxsize=256)
def quoted(text: str) -> str:
    return json.dumps(text)


# -- merging the ranks' files ----------------------------------------------------------------


def load(path: str) -> list[Event]:
    """The events of one file; a kill may have cost it the closing bracket."""
    with open(path, encoding="utf-8") as file:
        text = file.read().rstrip()
    if not text.endswith("]"):
        text = text.rstrip(",") + "]"
    try:
        events = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a timeline: {error}") from None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path} is not a timeline: it is not a JSON array of events")
    return events


def merge(paths: Iterable[str], output: str) -> None:
    """Put several ranks' timelines into one file, on the clock of the one that started first.

    Each rank gets its own range of "processes", named ``rank N: tensor``. The clocks of
    different hosts are taken at their word: they are as close as the hosts' time service.
    """
    traces: dict[int, tuple[int, list[Event]]] = {}
    sources: dict[int, str] = {}
    for position, path in enumerate(paths):
        if os.path.realpath(path) == os.path.realpath(output):
            raise ValueError(f"{output} is both an input and the output: choose another output")
        events = load(path)
        arguments = origin_of(events)
        if arguments is None:
            raise ValueError(f"{path} has no {START_TIME}: it was not written by Horovod")
        rank = int(arguments.get("rank", rank_in_name(path, position)))
        if rank in traces:
            raise ValueError(f"{sources[rank]} and {path} are both of rank {rank}: leave one out")
        traces[rank] = (int(arguments[START_TIME]), events)
        sources[rank] = path
    if not traces:
        raise ValueError("no timeline to merge: name at least one file")

    origin = min(started for started, _ in traces.values())
    next_pid = 0
    separator = "[\n"
    with open(output, "w", encoding="utf-8") as file:
        for rank in sorted(traces):
            started, events = traces[rank]
            first_pid = next_pid
            for event in events:
                moved = move(event, rank, first_pid, started - origin, origin)
                next_pid = max(next_pid, moved["pid"] + 1)
                file.write(separator + json.dumps(moved))
                separator = ",\n"
        file.write("\n]\n")


def origin_of(events: Iterable[Event]) -> Event | None:
    """The arguments of the record that says when, and since 0.29 on which rank, it was written."""
    for event in events:
        arguments: Event = event.get("args", {})
        if START_TIME in arguments:
            return arguments
    return None


def move(event: Event, rank: int, first_pid: int, delay: int, origin: int) -> Event:
    """One rank's event as it stands in the merged file."""
    moved = {**event, "pid": first_pid + event.get("pid", 0)}
    if "ts" in moved:
        moved["ts"] += delay
    if moved.get("ph") == "i":
        moved["s"] = "p"  # a rank's cycles concern that rank, not the whole picture
    if moved.get("ph") == "M":
        arguments = dict(moved.get("args", {}))
        if START_TIME in arguments:
            arguments = {"name": f"rank {rank}", **arguments, START_TIME: origin}
        elif "name" in arguments:
            arguments["name"] = f"rank {rank}: {arguments['name']}"
        if "sort_index" in arguments:
            arguments["sort_index"] = moved["pid"]
        moved["args"] = arguments
    return moved


def rank_in_name(path: str, otherwise: int) -> int:
    found = re.search(r"\.rank(\d+)(\.[^.]*)?$", os.path.basename(path))
    return int(found[1]) if found else otherwise


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m horovod.engine.timeline",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Work with the timelines that Horovod records.",
        epilog=HOW_TO,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    merging = commands.add_parser(
        "merge",
        help="put the files of several ranks into one, on one clock",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Put the timelines of several ranks into one file, on one clock.",
        epilog=HOW_TO,
    )
    merging.add_argument("output", metavar="OUT", help="the file to write")
    merging.add_argument("files", metavar="FILE", nargs="+", help="the ranks' files, in any order")
    options = parser.parse_args(arguments)
    try:
        merge(options.files, options.output)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {len(options.files)} rank(s). Open it in https://ui.perfetto.dev")
    return 0


HOW_TO = """\
Record: set HOROVOD_TIMELINE=/tmp/run.json for the job (horovodrun --timeline-filename does), or
call hvd.start_timeline("/tmp/run.json"). Rank 0 writes /tmp/run.json, rank 1 /tmp/run.rank1.json
and so on, each on its own host; collect them in one folder. They may be opened while training
runs, and after a crash.

Merge:  python -m horovod.engine.timeline merge all.json run*.json

View:   open https://ui.perfetto.dev (or chrome://tracing in Chrome) and drop the file into it.
        Every tensor is a row. NEGOTIATE_* is time spent waiting for the other ranks, with a tick
        when each becomes ready; the rest is the work itself. Long negotiation means that a rank
        computes slower or submits later than the others; many short collectives mean that
        HOROVOD_FUSION_THRESHOLD or HOROVOD_CYCLE_TIME is too small.
"""

if __name__ == "__main__":
    sys.exit(main())
