"""What every transport does when it breaks: once, for everybody, with one reason.

`BreakableTransport` keeps the first failure, refuses calls after it, turns whatever a collective
raised into one of our errors, and tells the other ranks. A transport built on it says how it
explains an exception (`_explain`), how others hear of a failure (`_announce`), and how ranks that
wait are woken (`_wake`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from horovod.common.exceptions import HorovodInternalError, fresh_copy
from horovod.transport.base import Group, Transport
from horovod.transport.failures import FailureBoard


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
        """Around every collective: refuses when broken, and breaks when it fails."""
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
        """Break the transport for everybody; returns the reason, which may be an earlier one."""
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
        """The error for the caller and the others, from what a collective raised here.

        Others post the reason, then let go of their connections. So see first who is gone, and then
        look at the board.
        """
        if isinstance(error, HorovodInternalError):
            return error
        me = self.group.describe(self.rank)
        return HorovodInternalError(f"{me} failed in a collective: {type(error).__name__}: {error}")

    def _announce(self, failure: HorovodInternalError) -> None:
        """Tell the other ranks why."""
        self._board.post(failure)

    def _wake(self, failure: HorovodInternalError) -> None:
        """End what ranks wait for, here and on the others, whoever it is that they wait for."""

    # -- the end ---------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        self._break(HorovodInternalError(reason))

    def _shut(self) -> bool:
        """Refuse every later call; whether the transport was whole until now."""
        whole, self._closed = self._failure is None, True
        if whole:
            self._failure = HorovodInternalError("Horovod has been shut down")
        return whole
