"""The state of the worker processes of this machine: running, sleeping, stopped.

`dashboard` looks once a moment. A rank that is stopped by a signal cannot report that itself.
"""

from __future__ import annotations

import psutil

from horovod.runner.dashboard.board import Board
from horovod.runner.dashboard.rank import Rank
from horovod.runner.slots.hosts import is_local

_DEPTH = 8  # processes between the one that was launched and the one that trains


class ProcessStates:
    """Remembers which processes belong to the job: a number alone may be somebody else's."""

    def __init__(self) -> None:
        self._ours: dict[tuple[int, int], bool] = {}

    def look(self, board: Board) -> None:
        for rank in board.ranks.values():
            if rank.launched and rank.code is None and is_local(rank.host):
                rank.process_state = _state(self._process_of(rank))

    def _process_of(self, rank: Rank) -> int:
        """The process that reports, if it descends from the launched one; else that one."""
        if rank.pid == rank.launched:
            return rank.launched
        pair = rank.launched, rank.pid
        if pair not in self._ours:
            if len(self._ours) > 4096:
                self._ours.clear()
            self._ours[pair] = _descends(rank.pid, rank.launched)
        return rank.pid if self._ours[pair] else rank.launched


def _state(pid: int) -> str:
    """The letter of /proc/<pid>/stat; empty where there is no such process."""
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
