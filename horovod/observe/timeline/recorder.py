"""Record what happened to every tensor and when, as a trace that Chrome and Perfetto open.

The engine owns at most one `Timeline` and calls it around negotiation, execution and the
activities within, bindings around their steps. Every rank writes its own file;
``python -m horovod.timeline`` merges the files of several ranks and explains them.

A file is one JSON array with one event per line, in upstream's event shapes: first a metadata
record with the start time, then every tensor as a "process" whose rows hold nested begin ("B")
and end ("E") events. It is complete after each event, so a killed rank leaves a loadable file.
Upstream has none of the following, which is in arguments of these events or in rows of its own:

- the first record also tells rank, size, host, the host's monotonic clock at the start, the cores
  on which the rank may run, and the fusion threshold;
- the row of several tensors that are reduced together tells which they are;
- the end of a negotiation tells the number of the collective in its process set, the same on all
  ranks, so that readers can match the files of ranks that began to record at different times;
- "WAIT" in the row "waiting" is time in which a thread of the program waited for results;
- "STEP" and "BACKWARD" in an optimizer's row are its steps; where the kernel counts them, a step
  has the microseconds in which its thread ran, and those in which it lacked a core ("starved").
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from horovod.common.logging import get_logger
from horovod.observe.timeline.files import BACKWARD, NEGOTIATE, START_TIME, STEP, VERSION, WAIT

if TYPE_CHECKING:
    import torch

log = get_logger(__name__)

CLOSING = b"\n]\n"
PAGE = 4096
WAITING = "waiting"  # the row of waits


class ThreadTimes(NamedTuple):
    """Totals of a thread since it began, in seconds.

    A step that is long because its core was taken looks like one that computes more, unless
    somebody asks the kernel.
    """

    ran: float  # on a core
    starved: float  # ready to run, and waiting for a core


def thread_times() -> ThreadTimes | None:
    """Return the times of the calling thread; None where the kernel does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            ran, starved = file.read(100).split()[:2]
    except (OSError, ValueError):
        return None
    if ran == b"0":  # a kernel that has the file and does not count
        return None
    # For a running thread the file's own number is as old as the last tick, up to 10 ms.
    return ThreadTimes(time.thread_time(), int(starved) / 1e9)


def allowed_cores() -> list[int] | None:
    """Return the numbers of the cores on which this process may run; None where unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return sorted(os.sched_getaffinity(0))


class Timeline:
    """Writes one rank's trace. Any thread may call; nothing here ever raises into training."""

    def __init__(
        self,
        path: str,
        rank: int,
        mark_cycles: bool = False,
        size: int | None = None,
        host: str | None = None,
        members: Mapping[str, Sequence[str]] | None = None,
        fusion_threshold: int | None = None,
    ) -> None:
        """Open the file.

        Args:
            path: The file of rank 0; see `path_of_rank`.
            rank: This rank.
            mark_cycles: Whether rounds of the engine are recorded.
            size: The number of ranks.
            host: The name of this host.
            members: The names of the tensors that a row stands for, if these are several.
            fusion_threshold: The fusion threshold in bytes.
        """
        self.path = path_of_rank(path, rank)
        self.mark_cycles = mark_cycles
        self._members = {} if members is None else members
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        self._times: dict[str, tuple[int, ThreadTimes]] = {}  # after a row's last step; its thread
        self._descriptor: int | None = None
        self._end = 0  # where the closing bracket stands, and the next event goes
        self._separator = b"[\n"
        self._started = time.perf_counter_ns()
        epoch = time.time_ns() // 1000
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            self._warn(error)
            return
        with self._lock:
            origin: dict[str, object] = {START_TIME: epoch, "rank": rank, "size": size}
            origin |= {"host": host, "clock": self._started // 1000, "version": VERSION}
            origin |= {"cores": allowed_cores(), "fusion_threshold": fusion_threshold}
            known = {key: value for key, value in origin.items() if value is not None}
            self._write(metadata("process_name", 0, **known))
            self._write(metadata("process_sort_index", 0, sort_index=0))

    # -- what happens to a tensor ------------------------------------------------------------

    def negotiate_start(self, name: str, kind: str) -> None:
        """Record that the tensor was submitted here: agreement with other ranks begins."""
        self._begin(name, NEGOTIATE + kind.upper())

    def rank_ready(self, name: str, rank: int, at: float, number: int) -> None:
        """Record when a rank had submitted the tensor; that becomes known only later.

        `number` is that of `negotiate_end`, because the name may be in use again by now.
        """
        body = f'"ph": "X", "name": "{rank}", "dur": 0, "args": {{"number": {number}}}'
        self._event(name, body, at)

    def negotiate_end(
        self, name: str, at: float | None = None, set_id: int = 0, number: int | None = None
    ) -> None:
        """Record the agreement; `number` counts the set's collectives, alike on all ranks."""
        body = '"ph": "E"'
        if number is not None:
            body += f', "args": {{"set": {set_id}, "number": {number}}}'
        self._event(name, body, at)

    def start(self, name: str, kind: str, at: float | None = None) -> None:
        """Record that the collective itself begins."""
        self._begin(name, kind.upper(), at)

    def activity(self, name: str, activity: str) -> Activity:
        """Return a context manager that records a phase of the collective."""
        return Activity(self, name, activity)

    def end(self, name: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Record the end of what began last; `tensors` are the result of a collective."""
        about: dict[str, object] = {}
        if tensors:
            kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
            about["dtype"] = ", ".join(kinds)
        if len(tensors) == 1:
            about["shape"] = str(list(tensors[0].shape))
        elif tensors:
            about |= {"count": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors)}
            if name in self._members:
                about["tensors"] = shortened(self._members[name])
        self._event(name, '"ph": "E"' + (f', "args": {json.dumps(about)}' if about else ""))

    # -- what the program does ---------------------------------------------------------------

    def waited(self, name: str, began: float, ended: float | None = None) -> None:
        """Record that a thread or a device waited for a result, by default until now."""
        ended = time.perf_counter() if ended is None else ended
        self._span(WAITING, WAIT, began, ended, f'{{"for": {quoted(name)}}}')

    def device_allreduce(
        self,
        name: str,
        nbytes: int,
        dtype: torch.dtype,
        ready: float,
        began: float,
        ended: float,
    ) -> None:
        """Record a bucket that a device has reduced, without an agreement before.

        `ready` is the time at which its gradients were there.
        """
        about = {"dtype": str(dtype).removeprefix("torch."), "bytes": nbytes}
        if name in self._members:
            about |= {"count": len(self._members[name]), "tensors": shortened(self._members[name])}
        self._begin(name, "NEGOTIATE_ALLREDUCE", ready)
        self._event(name, '"ph": "E"', began)
        self._begin(name, "ALLREDUCE", began)
        self._begin(name, "NCCL_ALLREDUCE", began)
        self._event(name, '"ph": "E"', ended)
        self._event(name, f'"ph": "E", "args": {json.dumps(about)}', ended)

    def step(
        self,
        row: str,
        number: int,
        began: float,
        backward: tuple[float, float],
        ended: float | None = None,
    ) -> None:
        """Record a step: from the last gradient of the step before to its own last gradient.

        Args:
            row: The name of the optimizer.
            number: The number of the step.
            began: The time at which the step before it ended.
            backward: The time of its first gradient, and that at which the program began to wait.
            ended: The time of its last gradient; by default now.
        """
        about = f'"step": {number}'
        if ended is None:  # otherwise a device made the step, and the thread's times mean nothing
            ended = time.perf_counter()
            about += self._thread_times(row)
        self._span(row, STEP, began, ended, f"{{{about}}}")
        if began <= backward[0] <= backward[1]:
            self._span(row, BACKWARD, *backward, f'{{"step": {number}}}')

    def _thread_times(self, row: str) -> str:
        """Return, as arguments, what the kernel has counted for this thread since the last step."""
        now, thread = thread_times(), threading.get_native_id()
        last = self._times.pop(row, None)
        if now is None:
            return ""
        self._times[row] = thread, now
        if last is None or last[0] != thread:
            return ""
        ran, starved = now.ran - last[1].ran, now.starved - last[1].starved
        return f', "ran": {round(ran * 1e6)}, "starved": {round(starved * 1e6)}'

    def _span(self, row: str, what: str, began: float, ended: float, about: str) -> None:
        """Record a stretch of time, from the start of the recording at the earliest."""
        began = max(began, self._started / 1e9)
        duration = max(0, round((ended - began) * 1e6))
        self._event(row, f'"ph": "X", "name": "{what}", "dur": {duration}, "args": {about}', began)

    def mark_cycle(self) -> None:
        """Record the beginning of a round of the engine, if the user asked for these."""
        if not self.mark_cycles:
            return
        with self._lock:
            stamp = self._stamp(time.perf_counter())
            self._write(f'{{"ph": "i", "name": "CYCLE_START", "ts": {stamp}, "pid": 0, "s": "g"}}')

    def close(self) -> None:
        """Stop recording. The file is complete already; later events are dropped."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            try:
                if descriptor is not None:
                    os.close(descriptor)
            except OSError as error:
                self._warn(error)

    # -- writing -----------------------------------------------------------------------------

    def _begin(self, name: str, what: str, at: float | None = None) -> None:
        self._event(name, f'"ph": "B", "name": {quoted(what)}', at)

    def _event(self, name: str, body: str, at: float | None = None) -> None:
        """Write an event that happened at a time by `time.perf_counter`, by default now."""
        with self._lock:
            if self._descriptor is None:
                return
            pid = self._pids.get(name)
            if pid is None:
                pid = self._pids[name] = len(self._pids) + 1
                about: dict[str, object] = {"name": name}
                if name in self._members:
                    about["tensors"] = list(self._members[name])
                self._write(metadata("process_name", pid, **about))
                self._write(metadata("process_sort_index", pid, sort_index=pid))
            stamp = self._stamp(time.perf_counter() if at is None else at)
            self._write(f'{{{body}, "ts": {stamp}, "pid": {pid}}}')

    def _stamp(self, at: float) -> int:
        return max(0, (int(at * 1e9) - self._started) // 1000)

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
            self._warn(error)
            # Drop a half-written event, so that what was recorded before stays readable.
            with contextlib.suppress(OSError):  # already reported: the same disk refused just now
                os.ftruncate(self._descriptor, self._end)
                os.pwrite(self._descriptor, CLOSING, self._end)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
            return
        self._end += len(data) - len(CLOSING)
        self._separator = b",\n"

    def _warn(self, error: OSError) -> None:
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
        self._timeline._begin(self._name, self._activity)

    def __exit__(self, *error: object) -> None:
        self._timeline.end(self._name)


def path_of_rank(path: str, rank: int) -> str:
    """Return the file of a rank: `path` itself for rank 0, as upstream, else run.rank3.json."""
    if rank == 0:
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}.rank{rank}{suffix}"


def metadata(what: str, pid: int, **arguments: object) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": pid, "args": arguments})


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@lru_cache(maxsize=256)
def quoted(text: str) -> str:
    return json.dumps(text)
