"""An elastic worker's view of its job: the newest decision, and the generation that it is in.

The engine's `init` calls `Membership.form` instead of starting directly. It enters the newest
decision, whose workers then find each other in a `Generation`, a part of the job's store. If that
fails, or a newer decision appears meanwhile, it tries again with the newest. One watcher thread
waits for decisions. A decision that says that a peer is gone breaks the generation at once
(`on_break`), so that no worker waits for a timeout. Any other decision is only noted, and the
training loop asks for it at its next commit (`horovod.elastic.worker`).

A worker that is told to leave does so at a commit, where the others learn of it. Until then it
joins new generations like any other worker, because it may be the last that has the state. Only a
worker that has never been in a generation leaves at once.

A generation may also break without any decision, because a connection broke although all workers
live. Then the same decision is tried again: generations are numbered by decision and attempt, and
an attempt that one worker has left is over for all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from horovod.common.config import ELASTIC
from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations.decisions import (
    DRIVER_LOST,
    LATEST,
    Decision,
    answer_key,
    decision_key,
)
from horovod.common.generations.generation import Generation, first_open_attempt
from horovod.common.joining.launcher_store import launchers_store
from horovod.common.logging import get_logger
from horovod.common.store import Store

logger = get_logger(__name__)

WORKER_ID = "HOROVOD_WORKER_ID"

_WATCH_SLICE = 10.0  # seconds after which the watcher notices a silent driver
_MOMENT = 1.0  # seconds for the driver to notice what broke a generation before it is tried again
_CONNECT_SECONDS = 10.0  # to reach the driver, which is there before its workers
_LAST_WORDS = 5.0  # seconds to end in order once the driver is gone
_FAREWELL = 30.0  # seconds for others to meet before a worker leaves that has the state
_MOST_FRUITLESS = 3  # generations of one decision that may break before anything was committed


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether an elastic launcher started this process."""
    return bool(environ.get(WORKER_ID) and ELASTIC.read(environ))


class Membership:
    """One worker in its job.

    Args:
        store: The driver's store.
        worker_id: The worker's name in the job.
    """

    def __init__(self, store: Store, worker_id: str) -> None:
        self.store = store
        self.worker_id = worker_id
        self.generation: Generation | None = None
        # Called by the watcher's thread with the reason and the generation, which this worker may
        # have left already.
        self.on_break: Callable[[str, Generation], None] = lambda reason, generation: None
        self.leaving = False  # whether it was told to leave (SIGTERM)
        self.holds_state = False  # has been in a generation, so that others may need its state
        self.unrecoverable: str | None = None  # why another try is of no use
        self._newest: Decision | None = None
        self._changed = threading.Condition()
        self._expected = 0  # the number of the decision that should follow what happened
        self._fruitless = (0, 0)  # a decision, and how many of its generations broke uncommitted
        self._finished = False
        self._has_lost_driver = False
        self._had_slot = False  # whether a decision so far had a slot for it
        self._has_confirmed = False  # whether the driver knows that this worker has the state

    @property
    def newest(self) -> Decision:
        """The newest decision that this worker knows."""
        if self._newest is None:
            try:
                self.store.set(answer_key("ready", worker=self.worker_id), b"")
                number = self._first_number()
                self._newest = Decision.decode(self.store.get(decision_key(number), 1.0))
            except ConnectionError as error:
                _end_before_the_first_decision(self.worker_id, error)
            threading.Thread(target=self._watch, name="horovod-decisions", daemon=True).start()
        return self._newest

    @property
    def may_leave(self) -> bool:
        """Whether it was told to leave, and no other worker can need its state."""
        return self.leaving and not self.holds_state

    def _first_number(self) -> int:
        """Wait for the first decision and return its number. The driver limits how long."""
        while True:
            try:
                return int(self.store.get(LATEST, _WATCH_SLICE))
            except TimeoutError:
                if self.may_leave:
                    self.leave()

    # -- forming a generation ---------------------------------------------------------------------

    def form(self, start: Callable[[], None], patience: float) -> None:
        """Enter the newest decision and call `start` in its generation, until that succeeds.

        Args:
            start: A function that connects this worker with the others of the generation.
            patience: Seconds within which that must succeed, or a new decision must appear.

        Raises:
            SystemExit: This worker has no slot in the job any more.
            HorovodInternalError: Neither happened in time.
        """
        deadline, number = time.monotonic() + patience, 0
        while True:
            generation = self._enter()
            if generation.decision.number > number:
                deadline, number = time.monotonic() + patience, generation.decision.number
            try:
                start()
                return
            except (HorovodInternalError, TimeoutError, ConnectionError) as error:
                generation.close()
                self.report_broken(generation, error)
                if self.unrecoverable is None and time.monotonic() > deadline:
                    self.unrecoverable = (
                        f"the workers of decision {number} did not meet within {patience:g} s"
                    )
                self._end_without_driver()
                if self.unrecoverable is not None:
                    raise HorovodInternalError(f"{self.unrecoverable}; last: {error}") from error
                logger.info("%s did not come about: %s", generation, error)
            except BaseException:
                generation.close()
                raise

    def _enter(self) -> Generation:
        """Enter the newest decision that has a slot for this worker."""
        while True:
            # The driver probably hears just now of what broke our generation.
            decision = self._await(self._expected)
            self._end_without_driver()
            if self.unrecoverable is not None:
                raise HorovodInternalError(self.unrecoverable)
            number, slot = decision.number, decision.slots.get(self.worker_id)
            if self.may_leave:
                self.leave()
            if slot is None and (self._had_slot or decision.is_final):
                if not self._may_go(decision):
                    continue
                self._finished = True
                logger.warning(
                    "worker %s ends: it has no place in the job any more (%s)",
                    self.worker_id,
                    decision.reason,
                )
                raise SystemExit(0)
            if slot is None or decision.too_few:
                self._await(number + 1)
                continue
            self._had_slot = True
            try:
                attempt = first_open_attempt(self.store, number)
                self.store.set(answer_key("seen", number, self.worker_id), b"%d" % attempt)
            except ConnectionError as error:  # the watcher finds out whether that is for good
                logger.info("cannot enter decision %d: %s", number, error)
                self._await(number + 1)
                continue
            generation = Generation(self, decision, attempt, slot)
            with self._changed:  # a decision after this line finds the generation, and may break it
                if self._newest is decision:
                    self.generation = generation
                    return generation

    def _may_go(self, decision: Decision) -> bool:
        """Return whether this worker may end, after a decision that has no slot for it.

        If it has the state, it first waits until the others have met without it: until then all of
        them may be lost, and a newer decision have a slot for it. It then tells the driver.
        """
        if not self.holds_state or decision.is_final:
            return True
        number, deadline = decision.number, time.monotonic() + _FAREWELL
        keys, found = [decision_key(number + 1), answer_key("formed", number)], ""
        with contextlib.suppress(ConnectionError):  # the watcher finds out whether that is for good
            while not (found or self.leaving) and time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    found, _ = self.store.get_any(keys, _MOMENT)
            if found != keys[0]:
                self.store.set(answer_key("leaving", worker=self.worker_id), b"")
                return True
        self._await(number + 1)
        return False

    def _await(self, number: int) -> Decision:
        """Wait a moment for decision `number`, or a reason to end; return the newest decision."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.unrecoverable is not None or self.newest.number >= number, _MOMENT
            )
            return self.newest

    def note_left(self, generation: Generation) -> None:
        """Note that this worker has left a generation; another decision should follow."""
        with self._changed:
            if self.generation is generation:
                self.generation = None
            self._expected = generation.decision.number + 1

    def can_recover(self) -> bool:
        """Return whether another generation may succeed, after a collective has failed."""
        self._end_without_driver()
        generation = self.generation
        if generation is not None and generation.is_formed and not generation.made_progress:
            number = generation.decision.number
            times = self._fruitless[1] + 1 if self._fruitless[0] == number else 1
            self._fruitless = number, times
            if times >= _MOST_FRUITLESS and self.unrecoverable is None:
                self.unrecoverable = f"failed {times} times before anything was committed"
        return self.unrecoverable is None

    def confirm_state(self) -> None:
        """Tell the driver, once, that this worker has the state; if that fails, try next time."""
        if not self._has_confirmed:
            with contextlib.suppress(OSError):
                self.store.set(answer_key("received", worker=self.worker_id), b"")
                self._has_confirmed = True

    def report_broken(self, generation: Generation, error: Exception) -> None:
        """Tell the driver, for its status file, why this worker cannot go on in a generation."""
        with contextlib.suppress(OSError):
            key = answer_key("broken", generation.decision.number, self.worker_id)
            self.store.set(key, str(error).encode())

    # -- the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Note that the training function has returned: from now on the driver may end."""
        self._finished = True
        with contextlib.suppress(OSError):
            self.store.set(answer_key("done", worker=self.worker_id), b"")

    def retire(self) -> None:
        """Stop watching the driver, because this worker's function has returned or failed.

        The driver may end at any moment from then on, and this is no error.
        """
        self._finished = True

    def leave(self) -> NoReturn:
        """Leave the job on purpose: say so, and end the process in order."""
        self._finished = True
        logger.warning("worker %s leaves the job, as it was told to", self.worker_id)
        try:
            self.store.set(answer_key("leaving", worker=self.worker_id), b"")
        except OSError as error:
            # From a worker that said nothing, status 0 would mean that it has trained to the end.
            raise SystemExit(DRIVER_LOST) from error
        raise SystemExit(0)

    # -- watching ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for one decision after the other, until the driver is gone."""
        while True:
            try:
                content = self.store.get(decision_key(self.newest.number + 1), _WATCH_SLICE)
            except TimeoutError:
                continue
            except OSError:
                if self._finished:
                    return
            else:
                self._note(Decision.decode(content))
                continue
            # Perhaps only the connection is broken. This request opens another one and is answered
            # at once, so that the next broken connection is not taken for the same failure.
            try:
                self.store.try_get(LATEST)
            except OSError as error:
                if not self._finished:
                    self._lose_driver(error)
                return

    def _note(self, decision: Decision) -> None:
        """Take a decision, and break the generation if one of its workers is gone."""
        logger.info("decision %d (%s): %s", decision.number, decision.kind, decision.reason)
        with contextlib.suppress(OSError):  # the next wait says if that is for good
            self.store.set(answer_key("heard", decision.number, self.worker_id), b"")
        with self._changed:
            self._newest = decision
            generation = self.generation
            self._changed.notify_all()
            if generation is None or not generation.is_broken_by(decision):
                return
        self.on_break(generation.broken or decision.reason, generation)

    def _lose_driver(self, error: OSError) -> None:
        """End this worker, in order if possible: nobody decides about the job any more."""
        reason = f"the driver of this elastic job (horovodrun) is gone or out of reach: {error}"
        expected = self._newest is not None and self._newest.is_final
        level = logging.INFO if expected else logging.ERROR
        logger.log(level, "worker %s ends: %s", self.worker_id, reason)
        with self._changed:
            self.unrecoverable = reason
            self._has_lost_driver = True
            generation = self.generation
            self._changed.notify_all()
            if generation is not None:
                generation.broken = generation.broken or reason
        if generation is not None:
            self.on_break(reason, generation)
        time.sleep(_LAST_WORDS)
        if not self._finished:
            logger.error("worker %s did not end by itself within %g s", self.worker_id, _LAST_WORDS)
            os._exit(DRIVER_LOST)

    def _end_without_driver(self) -> None:
        """End the process if the driver is out of reach, with a status that tells it why.

        The cause may be a link that works again later. The driver must not take it for an error of
        the program: it ends the job when all workers have failed with one.
        """
        if self._has_lost_driver:
            raise SystemExit(DRIVER_LOST)


def _end_before_the_first_decision(worker_id: str, error: ConnectionError) -> NoReturn:
    """End a process that cannot reach the driver, with a status that does not blame its program."""
    logger.error("worker %s ends before it could begin: %s", worker_id, error)
    raise SystemExit(DRIVER_LOST) from error


_membership: Membership | None = None


def membership(environ: Mapping[str, str] = os.environ) -> Membership | None:
    """Return this process's membership; None when no elastic launcher started it.

    Raises:
        SystemExit: The driver cannot be reached.
    """
    global _membership
    if not is_elastic(environ):
        return None
    if _membership is None:
        address, worker_id = launchers_store(environ), environ[WORKER_ID]
        try:
            _membership = Membership(address.connect(_CONNECT_SECONDS), worker_id)
        except ConnectionError as error:
            _end_before_the_first_decision(worker_id, error)
    return _membership


def retire() -> None:
    """Stop watching the driver, if this process has ever taken part in an elastic job."""
    if _membership is not None:
        _membership.retire()


def _after_fork_in_child() -> None:
    global _membership
    _membership = None


os.register_at_fork(after_in_child=_after_fork_in_child)
