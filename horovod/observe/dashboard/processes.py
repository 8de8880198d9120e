"""Observe worker processes: their state on this machine, and the stacks of ranks that are late.

`dashboard` calls both regularly. A rank that is stopped by a signal cannot report that itself, so
`ProcessStates` reads it from the system. `StackRequests` asks for the stacks of ranks that others
wait for; the launcher's loop takes the requests and hands them to the agents of the hosts
(`horovod.runner.agents.stack`). No page can ask for a stack: pages only read.
"""

from __future__ import annotations

from collections import deque

import psutil

from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.rank import Rank
from horovod.runner.output.watcher import StackRequest
from horovod.runner.slots.hosts import is_local

_DEPTH = 8  # processes between the one that was launched and the one that trains


class ProcessStates:
    """Reads process states, and remembers which processes belong to the job.

    A pid alone does not prove that: it may belong to another program.
    """

    def __init__(self) -> None:
        self._ours: dict[tuple[int, int], bool] = {}

    def look(self, board: Board) -> None:
        for rank in board.ranks.values():
            if rank.launched and rank.code is None and is_local(rank.host):
                rank.process_state = _state(self._process_of(rank))

    def _process_of(self, rank: Rank) -> int:
        """Return the process that reports if it descends from the launched one, else the latter."""
        if rank.pid == rank.launched:
            return rank.launched
        pair = rank.launched, rank.pid
        if pair not in self._ours:
            if len(self._ours) > 4096:
                self._ours.clear()
            self._ours[pair] = _descends(rank.pid, rank.launched)
        return rank.pid if self._ours[pair] else rank.launched


def _state(pid: int) -> str:
    """Return the letter in /proc/<pid>/stat; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return fields[0].decode(errors="replace") if fields else ""


def _descends(pid: int, ancestor: int) -> bool:
    try:
        return ancestor in [each.pid for each in psutil.Process(pid).parents()[:_DEPTH]]
    except psutil.Error:
        return False


AGAIN_SECONDS = 30.0
"""Seconds between two stacks of one worker."""
_MOST_AT_ONCE = 4


class StackRequests:
    """Requests for stacks. The dashboard's thread adds them, and the launcher's takes them."""

    def __init__(self) -> None:
        self._requests: deque[StackRequest] = deque(maxlen=_MOST_AT_ONCE)
        self._asked: dict[str, float] = {}  # by worker: the time of the last request

    def look(self, board: Board, now: float) -> None:
        """Request the stacks of the ranks for which others have waited longest."""
        longest = sorted(board.awaited, key=lambda rank: -board.awaited[rank])
        for number in longest[:_MOST_AT_ONCE]:
            rank = board.ranks[number]
            is_due = now - self._asked.get(rank.worker, -AGAIN_SECONDS) >= AGAIN_SECONDS
            if is_due and rank.pid and rank.launched:
                self._asked[rank.worker] = now
                worker = int(rank.worker.removeprefix("w"))
                self._requests.append(StackRequest(worker, rank.pid))
        if len(self._asked) > 1024:
            self._asked.clear()

    def take(self) -> list[StackRequest]:
        """Return the requests since the last call."""
        found: list[StackRequest] = []
        while self._requests:
            found.append(self._requests.popleft())
        return found
