"""The workers of one decision of an elastic job, in one attempt to work together.

Generations are numbered by decision and attempt, and each has a part of the job's store. The
transports of its workers connect through that part. `membership` forms generations.
"""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations.decisions import Decision, formed_key
from horovod.common.store import PrefixStore, Store
from horovod.common.topology import Slot

_OVER = "over"  # the key that is set in a generation that a worker has left
_FIRST_SLICE, _LONGEST_SLICE = 0.2, 2.0
"""Seconds after which a wait for other workers checks whether it is still worth it.

A tenth of the time waited so far lies between them: every check costs the driver two requests of
each worker that waits, and a worker that hangs is waited for ten minutes.
"""


class GenerationMember(Protocol):
    """The part of a worker's `Membership` that its generation uses."""

    store: Store
    holds_state: bool

    @property
    def newest(self) -> Decision:
        """The newest decision that this worker knows."""

    @property
    def may_leave(self) -> bool:
        """Whether it was told to leave, and no other worker can need its state."""

    def note_left(self, generation: Generation) -> None:
        """Note that this worker has left a generation."""


class Generation(PrefixStore):
    """The workers of one decision in one attempt to work together: their part of the store.

    Until all are connected (`mark_formed`), a worker that waits for another gives up when a newer
    decision appears or another worker has given up. Afterwards only a broken generation ends a
    wait.
    """

    def __init__(
        self, member: GenerationMember, decision: Decision, attempt: int, slot: Slot
    ) -> None:
        super().__init__(member.store, _prefix(decision.number, attempt))
        self.decision = decision
        self.topology = slot.topology
        self.is_formed = False  # whether all workers are connected
        self.made_progress = False  # whether something was committed in it
        self.broken: str | None = None  # why its workers cannot go on
        self._member = member
        self._closed = False

    def mark_formed(self) -> None:
        """Note that all workers are connected."""
        self.is_formed = True
        # Checked after `is_formed` is set: if the watcher breaks the generation after this line,
        # `on_break` aborts what runs in it.
        if self.broken is not None:
            raise HorovodInternalError(self.broken)
        self._member.holds_state = True
        if self.topology.rank == 0:
            self._member.store.set(formed_key(self.decision.number), b"")

    def get(self, key: str, timeout: float) -> bytes:
        begun = time.monotonic()
        while True:
            waited = time.monotonic() - begun
            pause = min(max(_FIRST_SLICE, waited / 10), _LONGEST_SLICE)
            left = timeout - waited
            try:
                # A value that is there is taken, whatever else happened: the others may have it
                # too, and go on.
                return super().get(key, max(0.0, min(left, pause)))
            except TimeoutError:
                self._check()
                if left <= pause:
                    raise TimeoutError(
                        f"nobody set {key!r} of {self} within {timeout:g} s"
                    ) from None

    def try_get(self, key: str) -> bytes | None:
        value = super().try_get(key)
        if value is None and not self.is_formed:
            self._check()
        return value

    def close(self) -> None:
        """Leave the generation, so that no other worker waits for us in it."""
        if self._closed:
            return
        self._closed = True
        self._member.note_left(self)
        with contextlib.suppress(OSError):  # at the end of a job the driver may be gone
            self.set(_OVER, b"")

    def _check(self) -> None:
        """Raise if it is of no use to wait for the other workers."""
        if self.broken is not None:
            raise HorovodInternalError(self.broken)
        if self.is_formed:
            return
        newest = self._member.newest
        if newest.number > self.decision.number:
            raise HorovodInternalError(f"decision {newest.number} came: {newest.reason}")
        if self._member.may_leave:
            raise HorovodInternalError("this worker was told to leave")
        if super().try_get(_OVER) is not None:
            raise HorovodInternalError("another worker has given up this attempt to meet")

    def __str__(self) -> str:
        return f"the generation of decision {self.decision.number}"


def first_open_attempt(store: Store, number: int) -> int:
    """Return the first attempt to form the generation of a decision that no worker has left."""
    attempt = 0
    while store.try_get(f"{_prefix(number, attempt)}/{_OVER}") is not None:
        attempt += 1
    return attempt


def _prefix(number: int, attempt: int) -> str:
    """Return where the keys of a generation begin."""
    return f"generation/{number}/{attempt}"
