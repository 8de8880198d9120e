"""How the ranks of one host advance together, and how they notice that one of them does not.

Each rank has a control page in memory that all others map. Ranks advance in *steps*: a rank
publishes by writing its step number into its page and waits until the others' numbers have reached
its own. A waiting rank spins for a while; for longer if spinning has been enough before. Then it
blocks on its doorbell together with the process handles of the others, so a dead peer wakes it at
once. A rank that publishes rings only the doorbells of ranks that sleep. The shared-memory
transport builds its collectives on this.

There are no locks: every word of a control page has one writer, its own rank. What keeps a sleeper
from missing its wake-up is an order with memory barriers in between. A rank that goes to sleep
first sets its flag and then looks at the steps; a rank that publishes first writes its step and
then looks at the flags. So at least one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Iterable, Sequence

import torch

from horovod.common.exceptions import HorovodInternalError, PeerLostError, fresh_copy
from horovod.transport.base import WORD, Group
from horovod.transport.breakable import BreakableTransport
from horovod.transport.host.peer_memory import memory_name
from horovod.transport.host.segments import Member, share

CONTROL = 4096  # bytes of the control page, at the beginning of a segment

# Control page: words, a cache line apart where different ranks write at different times.
_STEP, _SLEEPING, STATE = 0, 8, 16
_REASON_AT, _REASON_LIMIT = 1024, 3000
_RUNNING, _CLOSED, _ABORTED = 0, 1, 2
_NEVER = 1 << 62  # a step that no rank takes

# How often a waiting rank looks before it sleeps; that takes 50 to 400 microseconds. Being woken
# takes some tens of microseconds, in which the others wait; looking takes a core that others may
# need.
_FEWEST_LOOKS, _MOST_LOOKS = 600, 5000
_SAFETY_WAKE_MS = 500  # after which a sleeper looks again even if nobody rings
_LEAVE_SECONDS = 0.3  # for which a failing rank waits until no other uses its memory

# On x86 other cores see the writes of a core in order. Elsewhere a lock's atomics order them.
_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")
_fence_lock = threading.Lock()


def _fence() -> None:
    """Issue a full memory barrier. Taking a lock is the only one that Python has."""
    _fence_lock.acquire()
    _fence_lock.release()


class SteppedTransport(BreakableTransport):
    """The steps, failures and end of a transport in shared memory; subclasses move the data."""

    def __init__(self, group: Group, segment_bytes: int) -> None:
        super().__init__(group)
        self._members: list[Member] = share(group, segment_bytes, group.config.start_timeout)
        self._memories = [member.memory for member in self._members]
        self._control = [memoryview(memory)[:CONTROL].cast("Q") for memory in self._memories]
        self._mine = self._control[self.rank]
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._other_control = [self._control[rank] for rank in self._others]
        self._neighbours = [
            (self._control[rank], self._members[rank].doorbell) for rank in self._others
        ]
        self._poll = select.poll()
        self._poll.register(self._members[self.rank].doorbell, select.POLLIN)
        self._process_of = {self._members[rank].process: rank for rank in self._others}
        for process in self._process_of:
            self._poll.register(process, select.POLLIN)
        crowded = self.size > (os.cpu_count() or 1)
        self._fewest_looks, self._most_looks = (1, 1) if crowded else (_FEWEST_LOOKS, _MOST_LOOKS)
        self._looks = self._fewest_looks
        self._step = 0
        self._has_formed = False  # whether all ranks have taken their first steps together

    # -- steps -----------------------------------------------------------------------------

    def _publish(self) -> int:
        """Take the next step: let the others see what we wrote before, and wake those asleep."""
        self._step = step = self._step + 1
        if not _ORDERED_STORES:
            _fence()  # our data must be visible before our step
        self._mine[_STEP] = step
        _fence()  # our step must be visible before we look whether anybody sleeps
        for control, doorbell in self._neighbours:
            if control[_SLEEPING]:
                os.eventfd_write(doorbell, 1)
        return step

    def _await(self, step: int, at_work: bool = False) -> None:
        """Wait until every rank has published `step`.

        With `at_work` all of them will do so soon, so it is worth spinning for longer, and the
        result says nothing about other waits.
        """
        looks = left = self._most_looks if at_work else self._looks
        for control in self._other_control:
            while control[_STEP] < step:
                left -= 1
                if left <= 0:
                    self._sleep_until(step)
                    break
        if not at_work:
            if left <= 0:
                self._looks = max(looks // 2, self._fewest_looks)
            elif left < looks // 2:
                self._looks = min(2 * looks, self._most_looks)
        if not _ORDERED_STORES:
            _fence()  # we must not read data from before the others' steps

    def _sleep_until(self, step: int) -> None:
        """Block until every rank has published `step`; raise if one cannot any more."""
        self._mine[_SLEEPING] = 1
        try:
            while True:
                _fence()  # our flag must be visible before we look at the steps
                behind = [r for r in self._others if self._control[r][_STEP] < step]
                if not behind:
                    return
                self._check_states(behind, step)
                ready = self._poll.poll(_SAFETY_WAKE_MS)
                if not ready and not self._has_formed:
                    self.group.check_rendezvous()
                for descriptor, _ in ready:
                    rank = self._process_of.get(descriptor)
                    if rank is None:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(descriptor)
                    elif self._control[rank][_STEP] < step:
                        raise self._lost(rank)
        finally:
            self._mine[_SLEEPING] = 0

    def _step_together(self) -> None:
        """Take a step, and wait until all ranks, which are at work, have taken it too."""
        self._await(self._publish(), at_work=True)

    def _check_states(self, behind: Sequence[int], step: int = _NEVER) -> None:
        """Raise if a rank has aborted, or one of those `behind` has left without taking `step`.

        The step is read again here: a rank may take its last step and leave after it was counted
        among those behind.
        """
        for rank in range(self.size):
            state = self._control[rank][STATE]
            if state == _ABORTED:
                others = [rank] if rank != self.rank else []
                raise HorovodInternalError(self._reason_of(rank), ranks=others)
            if state == _CLOSED and rank in behind and self._control[rank][_STEP] < step:
                who = self.group.describe(rank)
                raise PeerLostError(f"{who} has shut down Horovod", [rank])

    def _lost(self, rank: int) -> PeerLostError:
        """Return the error for a rank whose process has ended."""
        pid = self._members[rank].pid
        return PeerLostError(
            f"{self.group.describe(rank)} (pid {pid} on this host) has died", [rank]
        )

    def _reason_of(self, rank: int) -> str:
        """Return why a rank has aborted, as it wrote into its control page."""
        memory = self._memories[rank]
        (length,) = struct.unpack_from("Q", memory, _REASON_AT)
        start = _REASON_AT + WORD
        return bytes(memory[start : start + length]).decode(errors="replace")

    def _fail(
        self, error: BaseException, touched: Sequence[torch.Tensor] = (), since: int = 0
    ) -> None:
        """Tell all ranks that this one failed with `error`, and raise the error for the caller.

        Peers may write to the tensors `touched` as soon as all ranks have published step `since`.
        Before the caller goes on, all peers must have left the collective. If one cannot say so
        (its process is stopped), the tensors are kept for the rest of the process's life, so that
        nobody else gets their memory.
        """
        failure = self._break(self._explain(error))
        may_be_written = all(control[_STEP] >= since for control in self._other_control)
        if touched and may_be_written and not self._others_left():
            _kept_alive.extend(touched)
        if failure is not error and isinstance(error, Exception):
            raise fresh_copy(failure) from error

    def _explain(self, error: BaseException) -> HorovodInternalError:
        if isinstance(error, OSError):
            # A peer's memory is gone. When a process dies, its memory goes before its handle ends.
            for process in _wait_for_ends(self._process_of, _LEAVE_SECONDS):
                return self._lost(self._process_of[process])
            try:
                self._check_states(self._others)
            except HorovodInternalError as reason:
                return reason
            # On a busy machine a process may take longer than that to end, without its memory.
            for rank in self._others:
                if error.filename == memory_name(self._members[rank].pid):
                    return self._lost(rank)
        return super()._explain(error)

    def _announce(self, failure: HorovodInternalError) -> None:
        if not self._closed:
            self._set_state(_ABORTED, str(failure))

    def check_peers(self) -> None:
        super().check_peers()
        if not self._closed:
            self._check_states(())
            for rank in self._others:
                if self._control[rank][STATE] == _RUNNING and self._is_dead(rank):
                    raise self._lost(rank)

    def find_awaited(self) -> list[int]:
        step = self._step
        return [rank for rank in self._others if self._control[rank][_STEP] < step]

    def _is_dead(self, rank: int) -> bool:
        """Return whether the process of a rank has ended."""
        return bool(_wait_for_ends([self._members[rank].process], 0.0))

    def _others_left(self) -> bool:
        """Wait a moment for all other ranks to fail, close or die; return whether all have."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        waiting = list(self._others)
        while True:
            waiting = [
                rank
                for rank in waiting
                if self._control[rank][STATE] == _RUNNING and not self._is_dead(rank)
            ]
            if not waiting or time.monotonic() > deadline:
                return not waiting
            time.sleep(0.001)

    # -- life ------------------------------------------------------------------------------

    def _set_state(self, state: int, reason: str = "") -> None:
        """Let the others see that this rank has failed or closed, and wake all of them."""
        if self._mine[STATE] != _RUNNING:
            return
        text = reason.encode()[:_REASON_LIMIT]
        self._memories[self.rank][_REASON_AT : _REASON_AT + WORD + len(text)] = (
            struct.pack("Q", len(text)) + text
        )
        _fence()  # the reason must be visible before the state
        self._mine[STATE] = state
        _fence()  # and the state before anybody wakes up
        for member in self._members:
            with contextlib.suppress(OSError):
                os.eventfd_write(member.doorbell, 1)

    def close(self) -> None:
        if self._closed:
            return
        self._set_state(_CLOSED)
        self._shut()
        for member in self._members:
            member.close()

    def after_fork_in_child(self) -> None:
        if not self._closed:
            self._closed = True
            for member in self._members:
                member.close()


_kept_alive: list[torch.Tensor] = []  # tensors that a stopped peer might still write to


def _wait_for_ends(processes: Iterable[int], seconds: float) -> list[int]:
    """Wait until a process has ended, but not longer; return the handles (pidfds) of all that have.

    A program may have opened thousands of files before: select() takes no number from 1024 on.
    """
    ends = select.poll()
    for process in processes:
        ends.register(process, select.POLLIN)
    return [process for process, _ in ends.poll(seconds * 1000)]
