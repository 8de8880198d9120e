"""Whose stack the launcher asks for: that of ranks that others wait for, now and then.

`dashboard` looks once a moment; the launcher's loop takes the requests and hands them to the agents
of the hosts (`horovod.runner.agents.stack`). No page can ask for one: pages only read.
"""

from __future__ import annotations

from collections import deque

from horovod.runner.dashboard.board import Board
from horovod.runner.output.watcher import StackRequest

AGAIN_SECONDS = 30.0
"""Between two stacks of one worker."""
_MOST_AT_ONCE = 4


class StackRequests:
    """One thread looks, another takes."""

    def __init__(self) -> None:
        self._requests: deque[StackRequest] = deque(maxlen=_MOST_AT_ONCE)
        self._asked: dict[str, float] = {}  # by worker: when

    def look(self, board: Board, now: float) -> None:
        """Ask for the stacks of those who are waited for longest."""
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
