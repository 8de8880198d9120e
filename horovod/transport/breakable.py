"""What every transport does when it breaks: it breaks once, for all ranks, with one reason.

`BreakableTransport` keeps the first failure, refuses calls after it, turns any exception in a
collective into one of our errors, and tells the other ranks. A transport built on it says how an
exception is explained (`_explain`), how the other ranks hear of a failure (`_announce`), and how
ranks that wait are woken (`_wake`).

A rank whose connections break knows that something went wrong, but not what: the peer at the other
end may have died, or may have closed its end because yet another rank died. So a rank that fails
posts the reason in the group's store (`FailureBoard`) before it closes its connections, and a rank
that sees a connection break looks there first. The store may be gone as well (rank 0 often serves
it), so nothing here waits for it long.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from horovod.common.exceptions import HorovodInternalError, PeerLostError, fresh_copy
from horovod.transport.base import Group, Transport

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


class BreakableTransport(Transport):
    """A transport whose first failure is its last."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.on_failure: Callable[[HorovodInternalError], object] | None = None  # from any thread
        self._board = FailureBoard(group)
        self._failure: HorovodInternalError | None = None
        self._breaking = threading.Lock()
        self._closed = False

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Run a collective: refuse it if the transport is broken, and break if it fails."""
        self.check_usable()
        try:
            yield
        except BaseException as error:
            failure = self._break(self._explain(error))
            if failure is error or not isinstance(error, Exception):
                raise
            raise fresh_copy(failure) from error

    def check_usable(self) -> None:
        if self._failure is not None:
            raise fresh_copy(self._failure)

    def check_peers(self) -> None:
        if not self._closed:
            self.check_usable()

    def _break(self, failure: HorovodInternalError) -> HorovodInternalError:
        """Break the transport for all ranks, and return the reason, which may be an earlier one.

        The order matters: first the reason is there for calls in other threads, then the other
        ranks can read it, and only then is anybody woken who would ask for it.
        """
        with self._breaking:
            if self._failure is not None:
                return self._failure
            self._failure = fresh_copy(failure)
            self._failure.__cause__ = None  # tracebacks would keep the tensors of their frames
        self._announce(failure)
        self._wake(failure)
        if self.on_failure is not None:
            self.on_failure(failure)
        return failure

    # -- what a subclass may know better ---------------------------------------------------

    def _explain(self, error: BaseException) -> HorovodInternalError:
        """Return the error that all ranks raise, for an exception of a collective on this rank.

        Another rank that fails posts the reason and then closes its connections. So a subclass
        first looks whose connections have ended, and then at the board.
        """
        if isinstance(error, HorovodInternalError):
            return error
        me = self.group.describe(self.rank)
        return HorovodInternalError(f"{me} failed in a collective: {type(error).__name__}: {error}")

    def _announce(self, failure: HorovodInternalError) -> None:
        """Tell the other ranks why the transport is broken."""
        self._board.post(failure)

    def _wake(self, failure: HorovodInternalError) -> None:
        """Wake all ranks that wait in a collective, here and elsewhere, whatever they wait for."""

    # -- the end ---------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        self._break(HorovodInternalError(reason))

    def _shut(self) -> bool:
        """Refuse every later call, and return whether the transport has worked until now."""
        was_usable, self._closed = self._failure is None, True
        if was_usable:
            self._failure = HorovodInternalError("Horovod has been shut down")
        return was_usable
