"""What every transport does when it breaks: it breaks once, for all ranks, with one reason.

`BreakableTransport` keeps the first failure, refuses calls after it, turns any exception in a
collective into one of our errors, and tells the other ranks. A transport built on it says how an
exception is explained (`_explain`), how the other ranks hear of a failure (`_announce`), and how
ranks that wait are woken (`_wake`).
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
