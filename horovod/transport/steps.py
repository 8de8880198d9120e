"""How the ranks of one host advance together, and how they notice that one of them does not.

Each rank has a control page in memory that all others map. Ranks advance in *steps*: a rank
publishes by writing its step number into its page and waits until the others' numbers have reached
its own. A waiter spins for a while, the longer the more often that has been enough before, then
blocks on its doorbell together with the process handles of the others, so a dead peer wakes it at
once; a publisher rings only the doorbells of ranks that sleep. The shared-memory transport builds
its collectives on this.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Sequence

import torch

from horovod.common.exceptions import HorovodInternalError, PeerLostError, fresh_copy
from horovod.transport.base import WORD, Group
from horovod.transport.breakable import BreakableTransport
from horovod.transport.segments import Member, share

CONTROL = 4096  # bytes of the control page, at the beginning of a segment

# Control page: words, a cache line apart where different ranks write at different times.
_STEP, _SLEEPING, STATE = 0, 8, 16
_REASON_AT, _REASON_LIMIT = 1024, 3000
_RUNNING, _CLOSED, _ABORTED = 0, 1, 2
_NEVER = 1 << 62  # a step that no rank takes

# How often a waiter looks before it sleeps: 50 to 400 microseconds. Being woken takes some tens of
# microseconds, in which the others wait; looking takes a core that others may need.
_FEWEST_LOOKS, _MOST_LOOKS = 600, 5000
_SAFETY_WAKE_MS = 500  # a sleeper looks again this often even if nobody rings
_LEAVE_SECONDS = 0.3  # how long a failing rank waits for the others to keep off its memory

# Stores become visible in order on x86. Elsewhere a lock's atomics order them.
_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")
_fence_lock = threading.Lock()


def _fence() -> None:
    """A full memory barrier: taking a lock is the only one Python has."""
    _fence_lock.acquire()
    _fence_lock.release()


class SteppedTransport(BreakableTransport):
    """Steps, failure and life of a transport in shared memory; subclasses move the data."""

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
        self._met = False  # whether all ranks have taken their first steps together

    # -- steps -----------------------------------------------------------------------------

    def _publish(self) -> int:
        self._step = step = self._step + 1
        if not _ORDERED_STORES:
            _fence()
        self._mine[_STEP] = step
        _fence()  # our step must be visible before we look whether anybody sleeps
        for control, doorbell in self._neighbours:
            if control[_SLEEPING]:
                os.eventfd_write(doorbell, 1)
        return step

    def _await(self, step: int, at_work: bool = False) -> None:
        """Wait until every rank has published `step`; `at_work`: all of them will do so soon."""
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
            _fence()

    def _sleep_until(self, step: int) -> None:
        self._mine[_SLEEPING] = 1
        try:
            while True:
                _fence()  # our flag must be visible before we look at the steps
                behind = [r for r in self._others if self._control[r][_STEP] < step]
                if not behind:
                    return
                self._check_states(behind, step)
                ready = self._poll.poll(_SAFETY_WAKE_MS)
                if not ready and not self._met:
                    self.group.check_meeting()
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
        self._await(self._publish(), at_work=True)

    def _check_states(self, behind: Sequence[int], step: int = _NEVER) -> None:
        """Raise if a rank has aborted, or one of those `behind` has left without taking `step`.

        A rank may take its last step and leave after somebody has counted it among them.
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
        pid = self._members[rank].pid
        return PeerLostError(
            f"{self.group.describe(rank)} (pid {pid} on this host) has died", [rank]
        )

    def _reason_of(self, rank: int) -> str:
        memory = self._memories[rank]
        (length,) = struct.unpack_from("Q", memory, _REASON_AT)
        start = _REASON_AT + WORD
        return bytes(memory[start : start + length]).decode(errors="replace")

    def _fail(
        self, error: BaseException, touched: Sequence[torch.Tensor] = (), since: int = 0
    ) -> None:
        """Tell everybody that this rank failed with `error`, and raise what the caller gets.

        Peers may write to `touched` as soon as everybody has published step `since`. Before
        control goes back to the caller all of them must have left the collective; if one cannot
        say so (it is stopped), the memory is kept from reuse for the rest of the process's life.
        """
        failure = self._break(self._explain(error))
        passed = all(control[_STEP] >= since for control in self._other_control)
        if touched and passed and not self._others_left():
            _kept_alive.extend(touched)
        if failure is not error and isinstance(error, Exception):
            raise fresh_copy(failure) from error

    def _explain(self, error: BaseException) -> HorovodInternalError:
        if isinstance(error, OSError):
            # A peer's memory vanished under us. The process handle follows its memory in death.
            handles = list(self._process_of)
            for process in select.select(handles, [], [], _LEAVE_SECONDS)[0]:
                return self._lost(self._process_of[process])
            try:
                self._check_states(self._others)
            except HorovodInternalError as reason:
                return reason
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

    def _is_dead(self, rank: int) -> bool:
        return bool(select.select([self._members[rank].process], [], [], 0)[0])

    def _others_left(self) -> bool:
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
        if self._mine[STATE] != _RUNNING:
            return
        text = reason.encode()[:_REASON_LIMIT]
        self._memories[self.rank][_REASON_AT : _REASON_AT + WORD + len(text)] = (
            struct.pack("Q", len(text)) + text
        )
        _fence()
        self._mine[STATE] = state
        _fence()
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


_kept_alive: list[torch.Tensor] = []
