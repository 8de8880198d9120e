"""One process set's operations, from submission to completion.

A thread that waits for a request runs rounds (`rounds`) itself, so that a blocking call needs no
hand-over. A background thread (`background`) runs rounds for which nobody waits. Each process set
has its own channel, hence its own queue and rounds: sets never block each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.agreement.background import BackgroundThread
from horovod.engine.agreement.request_queue import RequestQueue
from horovod.engine.agreement.rounds import Rounds
from horovod.engine.agreement.waiters import Waiters
from horovod.engine.collective import Collective, Kind, signature_of
from horovod.engine.execution import capture
from horovod.engine.execution.executor import Executor
from horovod.engine.execution.lane import Lane
from horovod.engine.request import Request, caller
from horovod.transport.base import Group
from horovod.transport.device.process_group import DeviceTransport

_MOMENT = 0.05  # seconds between looks at a request that another thread fails
_LONGEST_GOODBYE = 5.0  # seconds that shutting down waits for a round in progress


@dataclass
class InlineReduction:
    """What the stall inspector sees of an inline reduction."""

    name: str
    submitted: float
    frame: FrameType

    @property
    def source(self) -> str:
        path, line = caller(self.frame)
        return f"{path}:{line}"


class Channel:
    """A queue, the rounds that empty it, and the threads that run these; a `RoundDriver`."""

    def __init__(
        self,
        set_id: int,
        group: Group,
        executor: Executor,
        *,
        on_loss: Callable[[Sequence[int]], None],
        background_core: int | None = None,
    ) -> None:
        self.set_id = set_id
        self.group = group
        self.transport = executor.transport  # the one for host memory
        self.observer = executor.observer
        self.tuned: tuple[float, str | None] | None = None  # what autotuning has settled on
        self.inline: tuple[str, float, FrameType] | None = None  # under way: see `InlineReduction`
        self.lanes: dict[str, Lane] = {}
        self.driving = threading.Lock()  # held by the thread that runs a round
        self.waiters = Waiters()
        self._executor = executor
        executor.on_device_failure = self.abort
        self._on_loss = on_loss  # called with the lost ranks of the world
        self.queue = RequestQueue()
        self.rounds = Rounds(group, executor, self.queue, self.waiters)
        self._background = BackgroundThread(
            f"horovod-set{set_id}", self.queue, self.rounds.cycle, background_core
        )

    # -- submitting ------------------------------------------------------------------------

    def submit(self, request: Request, background: bool = True) -> Request:
        """Queue a request. With `background` false the caller will wait for it at once."""
        if capture.is_on():
            raise capture.cannot_capture(request)
        self.queue.append(request)
        self.observer.queued(request)
        if background and not self._background.rung.is_set():
            self._background.ring(self._background_round)
        return request

    def change(self, kind: Kind, what: tuple[str | int, ...], change: Callable[[], Any]) -> Any:
        """Change how operations run, on all ranks at the same point of their sequence."""
        collective = Collective(kind, "change", self.set_id, change=what)
        name = f"{kind.value}.change"
        request = Request(self, collective, name, signature_of(collective, name), change=change)
        return self.submit(request, background=False).wait()

    def transport_on(self, device: torch.device) -> DeviceTransport | None:
        """Return the device's own transport, if it has one and the device has been used before."""
        return self._executor.transport_on(device)

    def check_devices(self) -> None:
        """Raise if a device's work was ended in the middle."""
        self._executor.check_devices()

    # -- lanes -----------------------------------------------------------------------------

    def open_lane(self, name: str, device: torch.device) -> Lane | None:
        """Open a lane on all ranks; None where device tensors go through host memory."""

        def open_it() -> Lane | None:
            transport = self._executor.open_lane(name, device)
            if transport is None:
                return None
            self.lanes[name] = Lane(name, self, transport, self.observer.lane_counters)
            return self.lanes[name]

        lane: Lane | None = self.change(Kind.LANE, (name, device.type), open_it)
        return lane

    def close_lane(self, lane: Lane) -> None:
        """Release a lane that is not used any more."""
        if self.lanes.pop(lane.name, None) is not None:
            self._executor.close_lane(lane.name)

    def pending(self) -> list[Request | InlineReduction]:
        """Return the operations that have been submitted and have not run, oldest first."""
        inline = self.inline
        queued = self.queue.copy()
        return [InlineReduction(*inline), *queued] if inline is not None else [*queued]

    @property
    def num_run(self) -> int:
        """How many operations have run; all ranks run them in the same order."""
        return self.rounds.num_run

    def find_awaited(self) -> list[int] | None:
        """Return the ranks without which what runs now cannot go on; None if nobody knows."""
        return self.transport.find_awaited()

    @property
    def failure(self) -> HorovodInternalError | None:
        """Why nothing runs any more."""
        return self.queue.failure

    # -- autotuning: a `TunedSet` -----------------------------------------------------------

    @property
    def num_joins(self) -> int:
        return self.rounds.num_joins

    @property
    def algorithms(self) -> tuple[str, ...]:
        return self.transport.algorithms

    def tune(self, cycle_time: float, algorithm: str | None) -> None:
        self.rounds.cycle = self._background.cycle = cycle_time / 1000
        if algorithm is not None:
            self.change(Kind.ALGORITHM, (algorithm,), lambda: self.transport.use(algorithm))

    # -- driving ---------------------------------------------------------------------------

    def drive(self, request: Request) -> None:
        """Run rounds until `request` is finished."""
        began = time.perf_counter()
        while not request.finished:
            if not self.driving.acquire(blocking=False):
                with self.observer.waiting(request):
                    self.waiters.wait_for(lambda: request.finished or not self.driving.locked())
                continue
            try:
                if not request.finished:
                    self._guarded_round()
            finally:
                self.driving.release()
                if self.waiters.number:
                    self.waiters.tell()
            if not request.finished and self.failure is not None:
                # Another thread ends the channel and has taken the request from the queue. It fails
                # the request after telling the other ranks, which may take seconds: do not spin.
                self.wait_beside(request, _MOMENT)
        self.observer.waited_for(request, began)

    def _background_round(self) -> None:
        """Run a round for which the program does not wait, unless it is in `drive` meanwhile."""
        with self.driving:
            before = self.observer.begin_background()
            try:
                self._guarded_round()
            finally:
                self.observer.end_background(before)
        self.waiters.tell()

    def _guarded_round(self) -> None:
        try:
            if self.queue.requests:
                self.rounds.run_next()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def wait_beside(self, request: Request, seconds: float) -> None:
        """Wait while another thread runs rounds, at most `seconds`, until `request` is finished."""
        with self.observer.waiting(request):
            self.waiters.wait_for(lambda: request.finished, seconds)

    # -- ending ----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> HorovodInternalError:
        """Fail everything else, here and on the other ranks, because a round failed."""
        if isinstance(error, HorovodInternalError):
            failure = error
        else:
            me = self.group.describe(self.group.rank)
            failure = HorovodInternalError(f"{me} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self.abort(failure)
        return failure

    def abort(self, error: HorovodInternalError) -> None:
        """Fail everything here, and everything that other ranks do together with us."""
        if self.failure is None and error.ranks:
            self._on_loss([self.group.global_ranks[rank] for rank in error.ranks])
        left = self.queue.close(error)
        self._executor.abort(str(error))
        for request in left:
            request.fail(error)
        self.waiters.tell()

    def close(self, error: HorovodInternalError) -> None:
        """Stop: pending requests fail with `error`, the background thread ends."""
        self._let_comparisons_end()
        left = self.queue.close(error)
        self._background.close()
        for request in left:
            request.fail(error)
        self.waiters.tell()
        alone = self.driving.acquire(blocking=False)
        if not alone:
            # Another thread is in a round: wake it, and release nothing that it may still use.
            self._executor.abort(f"{self.group.describe(self.group.rank)} has shut down Horovod")
            alone = self.driving.acquire(timeout=_LONGEST_GOODBYE)
        try:
            self._executor.close()
        finally:
            if alone:
                self.driving.release()
                self.waiters.tell()
            self._background.join(_LONGEST_GOODBYE)
            self.lanes.clear()  # each is a cycle with this channel, which would keep shared memory

    def _let_comparisons_end(self) -> None:
        """Let the ranks compare what the last step has begun on a lane.

        This rank has its results already. Other ranks may compare only now, and would take the end
        of an orderly job for the loss of a rank.
        """
        deadline = time.monotonic() + _LONGEST_GOODBYE
        for request in self.queue.copy():
            if request.kind is Kind.CONFIRM and self.failure is None:
                self.wait_beside(request, max(0.0, deadline - time.monotonic()))

    def after_fork_in_child(self, reason: str) -> None:
        """Let nothing run in a forked child, not even what was prepared in its parent."""
        self.queue.failure = HorovodInternalError(reason)  # another thread may hold its lock
        self._executor.after_fork_in_child()
