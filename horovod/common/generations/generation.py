"""The workers of one decision of an elastic job, in one attempt to work together.

Generations are numbered by decision and attempt, and each has a part of the job's store. The
transports of its workers connect through that part. `membership` forms generations.
"""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations.decisions import Decision, answer_key, decision_key
from horovod.common.store import PrefixStore, Store
from horovod.common.topology import Slot

_OVER = "over"  # the key that is set in a generation that a worker has left
_SLICE = 4.0
"""Seconds after which a wait for other workers looks for a reason in this process to end it.

What happens elsewhere ends it at once: another worker gives up, or the driver decides anew.
"""


class GenerationMember(Protocol):
    """The part of a worker's `Membership` that its generation uses."""

    store: Store
    worker_id: str
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
        self._next = decision.number + 1  # the decision that may end a wait

    def mark_formed(self) -> None:
        """Note that all workers are connected."""
        self.is_formed = True
        # Checked after `is_formed` is set: if the watcher breaks the generation after this line,
        # `on_break` aborts what runs in it.
        if self.broken is not None:
            raise HorovodInternalError(self.broken)
        if not self._member.holds_state:
            self._keep_slot()  # last: a worker that has said so must go on
        self._member.holds_state = True
        if self.topology.rank == 0:
            self._member.store.set(answer_key("formed", self.decision.number), b"")

    def _keep_slot(self) -> None:
        """Make sure of this worker's slot: its program chooses a device next, by its local rank.

        The driver may move a worker that has not met any others to another slot. When it makes a
        decision, it looks at the key that is set here. If it has made one before that and given
        this worker another local rank, raise, so that this generation is given up.
        """
        store, worker = self._member.store, self._member.worker_id
        store.set(answer_key("met", worker=worker), b"")
        newest, number = self.decision, self.decision.number
        while (content := store.try_get(decision_key(number + 1))) is not None:
            newest, number = Decision.decode(content), number + 1
        slot = newest.slots.get(worker)
        if slot is None or slot.topology.local_rank != self.topology.local_rank:
            raise _came(newest)

    def is_broken_by(self, decision: Decision) -> bool:
        """Return whether a newer decision ends what this one began, and note why if so."""
        is_broken = decision.breaks(self.decision)
        if is_broken and self.broken is None:
            self.broken = f"decision {decision.number}: {decision.reason}"
        return is_broken

    def get(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        own, over = self._prefix + key, self._prefix + _OVER
        while True:
            left = deadline - time.monotonic()
            keys = [own, decision_key(self._next)] + [over] * (not self.is_formed)
            try:
                # Take a value that is there, whatever else has happened: other workers may have
                # taken it too, and go on.
                found, value = self._store.get_any(keys, max(0.0, min(left, _SLICE)))
            except TimeoutError:
                self._check()
                if left <= _SLICE:
                    raise TimeoutError(
                        f"nobody set {key!r} of {self} within {timeout:g} s"
                    ) from None
                continue
            if found == own:
                return value
            if found == over:
                self._check_open()
            else:
                decision = Decision.decode(value)  # the watcher's thread may read it later
                self._next = decision.number + 1
                if self.is_broken_by(decision) or not self.is_formed:
                    raise _came(decision)

    def try_get(self, key: str) -> bytes | None:
        value = super().try_get(key)
        if value is None and not self.is_formed:
            self._check()
            self._check_open()
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
        """Raise if this worker knows a reason not to wait for the others."""
        if self.broken is not None:
            raise HorovodInternalError(self.broken)
        if self.is_formed:
            return
        newest = self._member.newest
        if newest.number > self.decision.number:
            raise _came(newest)
        if self._member.may_leave:
            raise HorovodInternalError("this worker was told to leave")

    def _check_open(self) -> None:
        """Raise if another worker has left before all were connected."""
        if not self.is_formed and super().try_get(_OVER) is not None:
            raise HorovodInternalError("another worker has given up this attempt to meet")

    def __str__(self) -> str:
        return f"the generation of decision {self.decision.number}"


def _came(decision: Decision) -> HorovodInternalError:
    """Return the error of a wait that a newer decision has ended."""
    return HorovodInternalError(f"decision {decision.number} came: {decision.reason}")


def first_open_attempt(store: Store, number: int) -> int:
    """Return the first attempt to form the generation of a decision that no worker has left."""
    attempt = 0
    while store.try_get(f"{_prefix(number, attempt)}/{_OVER}") is not None:
        attempt += 1
    return attempt


def _prefix(number: int, attempt: int) -> str:
    """Return where the keys of a generation begin."""
    return f"generation/{number}/{attempt}"
