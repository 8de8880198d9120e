"""Notice requests that some ranks wait for and others never submitted.

One thread per process looks at the channels now and then (a quarter of the warning time), so an
idle process costs nothing and transports know nothing of stalls. A rank that has waited too long
puts what it waits for, and the line of the user's code that submitted it, into the job's store;
the lowest of these ranks tells people who is missing. A broken network may be the reason of the
stall and cut off the store too: so a separate thread asks the store, and a rank that gets no answer
still ends its operations in time.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from horovod.common.exceptions import HorovodInternalError
from horovod.common.logging import get_logger
from horovod.observe.statistics.compilations import graph_count, waiting_hint
from horovod.observe.statistics.operations import ObservedChannel
from horovod.transport.base import Group

T = TypeVar("T")

logger = get_logger(__name__)

_NAMES_SHOWN = 6
_PATIENCE = 2.0  # seconds that the store may take before a rank goes on without its answer

_ADVICE = (
    "To end such a job instead of waiting on, set HOROVOD_STALL_SHUTDOWN_TIME_SECONDS "
    "(--stall-check-shutdown-time-seconds)."
)

Reports = dict[int, dict[str, Any]]  # rank in the group -> what it waits for


class StallInspector:
    """Watches channels from its own thread until `stop`."""

    def __init__(
        self,
        channels: Callable[[], Iterable[ObservedChannel]],
        warn_after: float,
        shut_down_after: float,
    ) -> None:
        self._channels = channels
        self._warn_after = warn_after
        self._shut_down_after = shut_down_after  # 0: never
        self._reported: dict[int, float] = {}  # set id -> when we last spoke of it
        self._posted: set[int] = set()
        self._asking: threading.Thread | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="horovod-stall", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._stop.wait(max(0.05, self._warn_after / 4)):
            for channel in list(self._channels()):
                self._inspect(channel)

    def _inspect(self, channel: ObservedChannel) -> None:
        now = time.monotonic()
        store, key = channel.group.store, f"stall/{channel.group.rank}"
        stalled = [r for r in channel.pending() if now - r.submitted > self._warn_after]
        if not stalled:
            self._reported.pop(channel.set_id, None)
            if channel.set_id in self._posted and self._ask(lambda: store.delete(key)) is not None:
                self._posted.discard(channel.set_id)
            return
        waited = now - stalled[0].submitted
        report = {
            "tensors": {r.name: r.source for r in stalled},
            "graphs": graph_count(),
            "run": channel.num_run,
            "awaits": channel.find_awaited(),
        }
        fatal = 0 < self._shut_down_after < waited
        is_due = fatal or now - self._reported.get(channel.set_id, 0.0) >= self._warn_after

        def exchange() -> Reports:
            store.set(key, json.dumps(report).encode())
            return _reports(channel.group, report, fatal) if is_due else {}

        self._posted.add(channel.set_id)
        reports = self._ask(exchange)
        if not is_due:
            return
        self._reported[channel.set_id] = now
        text = describe(channel, reports or {channel.group.rank: report}, waited)
        if not reports:
            text = f"The job's store does not answer: is this host cut off? {text}"
        if fatal:
            logger.error("%s\nShutting down after %g s, as configured.", text, waited)
            reports = reports or {}
            guilty = find_guilty(channel.group.size, reports)
            why = f"stalled for {waited:.1f} s: {text}"
            channel.abort(HorovodInternalError(why, ranks=sorted(guilty)))
        elif not reports or min(reports) == channel.group.rank:
            logger.warning("%s%s", text, "" if self._shut_down_after else f"\n{_ADVICE}")

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the store's answer; None if it is late, or if an earlier answer is still due."""
        if self._asking is not None and self._asking.is_alive():
            return None
        answers: list[T] = []

        def run() -> None:
            try:
                answers.append(question())
            except (OSError, TimeoutError) as error:
                logger.debug("stall check failed: %s", error)

        self._asking = threading.Thread(target=run, name="horovod-stall-store", daemon=True)
        try:
            self._asking.start()
        except RuntimeError:  # the interpreter is shutting down
            return None
        self._asking.join(_PATIENCE)
        return answers[0] if answers else None


def _reports(group: Group, mine: dict[str, Any], fatal: bool) -> Reports:
    """Return what waiting ranks have posted, in few requests however many they are.

    Only the lowest of them gives a warning, so the others just learn which rank that is. If the job
    is to end, all of them need the reports, and the first to ask collects them for all.
    """
    store = group.store
    if fatal and store.add("stalled/ranks", 1) > 1:
        with contextlib.suppress(TimeoutError):
            collected = json.loads(store.get("stalled/reports", _PATIENCE / 2))
            return {int(rank): report for rank, report in collected} | {group.rank: mine}
    waiting = sorted({group.rank, *(int(k.rpartition("/")[2]) for k in store.keys("stall/"))})
    reports: Reports = {waiting[0]: {"tensors": {}}, group.rank: mine}
    if not fatal and waiting[0] != group.rank:
        return reports
    for rank in waiting:
        data = None if rank == group.rank else store.try_get(f"stall/{rank}")
        if data is not None:  # otherwise that rank has gone on meanwhile
            reports[rank] = json.loads(data)
    if fatal:
        store.set("stalled/reports", json.dumps(list(reports.items())).encode())
    return reports


def find_missing(size: int, reports: Reports) -> dict[int, list[str]]:
    """Return the ranks that have not submitted what others wait for, and what that is."""
    names = list(dict.fromkeys(name for report in reports.values() for name in report["tensors"]))
    missing: dict[int, list[str]] = {}
    behind = find_behind(reports)
    ahead = reports.keys() - behind if behind else set()
    for rank in sorted(set(range(size)) - ahead):
        own = reports[rank]["tensors"] if rank in reports else {}
        lacking = [name for name in names if name not in own]
        if lacking:
            missing[rank] = lacking
    return missing


def find_behind(reports: Reports) -> set[int]:
    """Return the waiting ranks that are behind the others: they have run fewer operations.

    When the program of a rank hangs in the middle of an operation, some of the others have their
    results and already wait for the next operation: these are not missing in the earlier one.
    """
    run = {rank: report["run"] for rank, report in reports.items() if "run" in report}
    return {rank for rank, count in run.items() if count < max(run.values())}


def find_hanging(reports: Reports) -> set[int]:
    """Return the waiting ranks that others wait for, and that wait for no rank themselves.

    When the program of a rank hangs in the middle of an operation, this is what tells it from the
    others. Means something only if all ranks wait for the same operations: between two attempts to
    agree nobody waits for anybody.
    """
    awaits = {rank: report.get("awaits") for rank, report in reports.items()}
    awaited = {peer for peers in awaits.values() for peer in peers or ()}
    return {rank for rank in awaited if awaits.get(rank) == []}


def find_guilty(size: int, reports: Reports) -> set[int]:
    """Return the ranks that hold up the others, as far as the reports tell."""
    missing = find_missing(size, reports)
    if missing:
        # Those that wait for nothing come before those that merely wait for other operations.
        return missing.keys() - reports.keys() or find_behind(reports) or set(missing)
    return find_hanging(reports) or find_behind(reports)


def describe(channel: ObservedChannel, reports: Reports, waited: float) -> str:
    """Describe which ranks wait, for what, how long and in which line, and which are missing."""
    group = channel.group
    missing = find_missing(group.size, reports)
    lines = [
        f"Some ranks have waited {waited:.1f} s for operations that others have not submitted. "
        f"The others may be dead, stopped, busy, or running other operations. Missing ranks:"
    ]
    for rank, names in sorted(missing.items()):
        lines.append(f"{group.global_ranks[rank]}: [{_listed(names)}]")
    hanging = set() if missing else find_hanging(reports)
    behind = find_behind(reports)
    if hanging or behind:
        who = ", ".join(str(group.global_ranks[rank]) for rank in sorted(hanging or behind))
        what = "in which the others wait for them" if hanging else "that the others have finished"
        lines.append(f"In the middle of an operation {what}: {who}")
    lines.append("Waiting ranks:")
    for rank, report in sorted(reports.items()):
        places = [f"{name} ({source})" for name, source in report["tensors"].items()]
        lines.append(f"{group.global_ranks[rank]}: {_listed(places)}")
    hint = waiting_hint(
        {group.global_ranks[rank]: report.get("graphs", 0) for rank, report in reports.items()}
    )
    return "\n".join([*lines, hint] if hint else lines)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (" ..." if len(names) > _NAMES_SHOWN else "")
