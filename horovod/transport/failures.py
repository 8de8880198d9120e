"""How the ranks of a group tell each other why it broke.

A rank whose connections break knows that something went wrong, but not what: the peer at the other
end may have died, or may have closed its end because yet another rank died. So a rank that fails
posts the reason in the group's store before it closes its connections, and a rank that sees a
connection break looks there first. The store may be gone as well (rank 0 often serves it), so
nothing here waits for it long. Used by all transports that can break.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TypeVar

from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.transport.base import Group

T = TypeVar("T")

_PATIENCE = 2.0  # seconds that a store may take to answer before it counts as gone
_KEY = "failure"


class FailureBoard:
    """The first failure of the group, and which ranks have left it, kept in its store."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._leavers: set[int] = set()  # ranks that have said goodbye
        self.unreachable = False  # the store did not answer: its host may be what we lost

    def post(self, failure: HorovodInternalError) -> None:
        """Post the reason for the other ranks, unless there is one already."""
        lost = isinstance(failure, PeerLostError)
        ranks = list(failure.ranks)
        record = {"rank": self._group.rank, "reason": str(failure), "lost": lost, "ranks": ranks}

        def put() -> None:
            if self._group.store.try_get(_KEY) is None:
                self._group.store.set(_KEY, json.dumps(record).encode())

        self._ask(put)

    def look(self) -> HorovodInternalError | None:
        """Return the error to raise here for what a rank posted; None if nothing is posted."""
        content = self._ask(lambda: self._group.store.try_get(_KEY))
        if content is None:
            return None
        record = json.loads(content)
        ranks = record["ranks"]
        if record["lost"]:
            return PeerLostError(record["reason"], ranks)
        if record["rank"] == self._group.rank:
            return HorovodInternalError(record["reason"], ranks=ranks)
        who = self._group.describe(record["rank"])
        return HorovodInternalError(
            f"{who} ended the communication: {record['reason']}", ranks=ranks or [record["rank"]]
        )

    def say_goodbye(self) -> None:
        """Post that this rank closes its connections on purpose."""
        self._ask(lambda: self._group.store.set(f"closed/{self._group.rank}", b""))

    def said_goodbye(self, rank: int) -> bool:
        """Return whether a rank has posted that it closes its connections on purpose."""
        if rank not in self._leavers:  # at the end of a job all leave: ask for all of them at once
            keys = self._ask(lambda: self._group.store.keys("closed/")) or []
            self._leavers.update(int(key.rpartition("/")[2]) for key in keys)
        return rank in self._leavers

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the store's answer, or None if it has none or takes too long.

        The question runs on a thread of its own: the calling thread's connection may be in the
        middle of another request (we can be called from anywhere), and a silent server must not
        hold us up.
        """
        if self.unreachable:
            return None
        answers: list[T] = []

        def run() -> None:
            try:
                answers.append(question())
            except Exception:  # any store may fail in any way; it cannot answer then
                self.unreachable = True

        thread = threading.Thread(target=run, name="hvd-failure-board", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            return None
        thread.join(_PATIENCE)
        if thread.is_alive():
            self.unreachable = True
        return answers[0] if answers else None
