"""Run the dashboard of a job: take the launcher's events and the ranks' reports, and make a page.

`horovod.observe.dashboard.watching` makes it. The launcher's threads only append to queues; one
thread of the dashboard's own holds the board, serves the page and writes the saved file. If
anything goes wrong here, the job goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.common.logging import get_logger
from horovod.common.store import MemoryStore
from horovod.observe.dashboard import page
from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.logs import OutputTails
from horovod.observe.dashboard.processes import ProcessStates, StackRequests
from horovod.observe.dashboard.rank import STOPPED_BY_LAUNCHER
from horovod.observe.dashboard.reports import KEY_PREFIX, ReportQueue, parse_key
from horovod.observe.dashboard.server import Server
from horovod.runner.output.lines import Line
from horovod.runner.output.report import Exit, LaunchError, Outcome, exit_status, format_ranks
from horovod.runner.output.watcher import JobWatcher, StackRequest
from horovod.runner.slots.worker_env import CROWDED_ADVICE

_TICK = 0.5
_MOST_QUEUED = 10_000
_PATIENCE = 16.0
"""Seconds that the launcher waits for this thread at its end."""


class Dashboard(JobWatcher):
    """The page of one job, from its start to its end."""

    @property
    def wants_stacks(self) -> bool:
        return True

    def __init__(
        self,
        board: Board,
        store: MemoryStore,
        listener: socket.socket,
        token: str,
        say: Callable[[str], None],
        save: str | None = None,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._board = board
        self._store = store
        self._say = say
        self._save = save
        self._listener = listener
        self._token = token
        self._tails = OutputTails()
        self._states = ProcessStates()
        self._reports = ReportQueue(store)
        self._events: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=_MOST_QUEUED)
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._complained = False
        self._announced_crowding = False
        self._stacks = StackRequests()
        self._forgotten = 0  # the generation before which all reports are deleted from the store
        # A daemon, so that nothing that happens here keeps the launcher from ending.
        self._thread = threading.Thread(target=self._run, name="horovod-dashboard", daemon=True)
        self._thread.start()

    # -- called by the launcher ------------------------------------------------------------

    def variables(self) -> dict[str, str]:
        return {"HOROVOD_STATS_INTERVAL": f"{self._board.interval:g}"}

    def note(self, event: str, **details: Any) -> None:
        self._events.append((time.time(), event, details))

    def output(self, worker: int, rank: int, stream: str, lines: Sequence[Line]) -> None:
        self._tails.add(worker, stream, lines)

    def wanted_stacks(self) -> list[StackRequest]:
        return self._stacks.take()

    def ended(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def close(self, error: BaseException | None = None) -> None:
        if self._closing.is_set():
            return
        self._error = error
        self._closing.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(stop.set)
        self._thread.join(_PATIENCE)

    # -- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # the job must not notice
            get_logger(__name__).warning("the dashboard ended: %r", error)
        finally:
            self._listener.close()

    async def _serve(self) -> None:
        server = Server(self._board, self._tails, self._token, self._listener)
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await server.start()
        while not self._closing.is_set():
            self._guarded(self._take_all)
            server.connections.expire(time.monotonic())
            server.wake()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _TICK)
        self._guarded(self._take_all)
        self._guarded(self._take_end)
        self._guarded(self._write)
        await server.finish()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            if not self._complained:
                self._complained = True
                get_logger(__name__).exception("the dashboard made a mistake; the job goes on")

    def _take_all(self) -> None:
        """Take all events and reports since the last call, oldest first."""
        board = self._board
        events = deque(self._events.popleft() for _ in range(len(self._events)))
        reports = self._reports.take()
        while events or reports:
            if events and (not reports or events[0][0] <= reports[0][0]):
                at, event, details = events.popleft()
                self._take_event(event, details, at)
            else:
                at, report = reports.popleft()
                board.take_report(report, at)
        self._forget_reports()
        self._states.look(board)
        board.update(time.time())
        # A job with fixed ranks has said so at its start.
        if board.crowded and board.elastic and not self._announced_crowding:
            self._announced_crowding = True
            self._say(f"{board.crowded}. {CROWDED_ADVICE}")
        self._stacks.look(board, time.monotonic())

    def _take_event(self, event: str, details: dict[str, Any], at: float) -> None:
        board, log = self._board, self._board.events
        if event == "decision":
            number = int(details["number"])
            workers = {name: (host, rank) for name, (host, rank) in details["workers"].items()}
            log.decision(number, workers, str(details.get("message", "")), at)
            board.take_decision(number, workers, at)
        elif event == "formed":
            log.formed(int(details["decision"]), at)
        elif event == "started":
            board.started_worker(str(details["worker"]), int(details["pid"]))
        elif event == "exited":
            worker, code = str(details["worker"]), int(details["code"])
            # In an elastic job an event "failed" follows if the worker has failed by itself.
            ended_by = what_ended(code, {"stopped": code} if board.elastic else details)
            rank = board.exited_worker(worker, code, ended_by)
            if rank is not None and code != 0 and not board.elastic and not rank.ended_by:
                how = Exit(rank.rank, rank.pid, code).describe()
                log.lost(worker, str(details.get("host", "")), how, at)
        elif event == "failed":
            worker = str(details["worker"])
            board.mark_failed(worker, what_ended(1, details))
            log.lost(worker, str(details.get("host", "")), str(details.get("how", "")), at)
        elif event == "stack":
            worker = f"w{details['worker']}" if board.elastic else str(details["worker"])
            board.take_stack(worker, str(details["text"]).splitlines(), at)
        else:
            log.take_message(event, details, at)

    def _forget_reports(self) -> None:
        """Delete the reports of old generations, which nobody else deletes from the store."""
        current = self._board.generation
        if self._forgotten < current:
            self._forgotten = current
            for key in self._store.keys(KEY_PREFIX):
                found = parse_key(key)
                if found is not None and found[0] < current - 1:
                    self._store.delete(key)

    # -- the end ---------------------------------------------------------------------------

    def _take_end(self) -> None:
        outcome, error, now = self._outcome, self._error, time.time()
        if outcome is not None:
            blamed, cause = find_cause(outcome)
            if blamed and not self._board.elastic:
                self._board.blame(blamed, f"ended after rank {format_ranks(blamed)} had failed")
            self._board.end(exit_status(outcome), cause, outcome.account, now)
        elif isinstance(error, LaunchError):
            self._board.end(error.status, f"the job could not start: {error}", "", now)
        else:
            cause = "" if error is None else f"{type(error).__name__}: {error}"
            self._board.end(None, cause, "", now)
        self._board.update(now)

    def _write(self) -> None:
        if self._save is None:
            return
        data = {"board": self._board.changes(), "output": self._tails.all()}
        try:
            write_file(self._save, page.render({**data, "ranks": self._board.all_ranks()}))
        except OSError as error:
            self._say(f"the dashboard could not be saved to {self._save!r}: {error.strerror}")
        else:
            self._say(f"dashboard: saved to {os.path.abspath(self._save)}")


def find_cause(outcome: Outcome) -> tuple[list[int], str]:
    """Return the ranks that made a job fail, and one line on why it ended; empty if it finished."""
    first, lost = outcome.first_failure, outcome.lost
    if outcome.early_exits:
        ranks = [one.rank for one in outcome.early_exits]
        return ranks, f"rank {format_ranks(ranks)} left the job while other ranks still needed it"
    if first is not None:
        return [first.rank], f"rank {first.rank} on {first.host}: {first.describe()}"
    if lost is not None:
        return list(lost.ranks), f"{lost.name} (rank {format_ranks(lost.ranks)}) {lost.how}"
    if outcome.problem:
        return [], outcome.problem
    if outcome.interrupted is not None:
        return [], f"interrupted by signal {outcome.interrupted}"
    return [], "the output could not be written" if outcome.output_lost else ""


def what_ended(code: int, details: Mapping[str, Any]) -> str:
    """Return what ended a worker, from the event of its exit; empty if it ended by itself."""
    if details.get("stopped") and code != 0:
        return STOPPED_BY_LAUNCHER
    if code == 0 or details.get("because_of") is None:
        return ""
    ranks = format_ranks([int(rank) for rank in details["because_of"]])
    return f"ended because rank {ranks} was lost" if ranks else "ended because of others"


def write_file(path: str, text: str) -> None:
    """Write a file, whole or not at all, readable by its owner alone: output may be private."""
    folder = os.path.dirname(os.path.abspath(path))
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".dashboard-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
