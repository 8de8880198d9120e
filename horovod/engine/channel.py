"""A process set's queue of requests, and the rounds in which its ranks agree what to run.

Ranks may submit in any order. In a *round* every rank shows the signatures at the head of its
queue; the longest common prefix runs, fused where it can be. If there is none the ranks
negotiate: they exchange whole queues (`negotiation`). A round needs every rank of the set, so a
rank that has nothing to submit simply is not there yet and the others wait for it.

Whoever waits for a request drives rounds in its own thread, so that a blocking call needs no
hand-over. A background thread, started with the first asynchronous request, drives those that
nobody waits for; it sleeps while the queue is empty. Each process set has its own channel, hence
its own driver: sets never block each other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from horovod.common.exceptions import HorovodInternalError, fresh_copy
from horovod.engine.batches import Batch, before_join, plan
from horovod.engine.executor import Executor, Trace, reduce_
from horovod.engine.negotiation import JoinState, negotiate
from horovod.engine.prepared import InlineReduction, PreparedAllreduce
from horovod.engine.ranges import Ranges, profiler_records, size_of, waiting
from horovod.engine.request import Kind, Request, bytes_on_wire, signature_of
from horovod.engine.statistics import Counters
from horovod.engine.timeline import Timeline
from horovod.transport.base import MAX_TENSORS, MAX_WORDS, Group

_LONGEST_GATHERING = 5  # cycles that the background thread waits while requests keep coming
_LONGEST_PAUSE = 0.02  # seconds between rounds that settled nothing
_LONGEST_GOODBYE = 5.0  # seconds that shutting down waits for a round in progress
_LONGEST_END = 60.0  # the same at the end of the process

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of all channels


def finish_threads() -> None:
    """Wait for background threads that outlived their channel. For the end of the process.

    Python ends threads that are left by unwinding their stack. One that is in an operation of torch
    then aborts the process ("terminate called without an active exception").
    """
    deadline = time.monotonic() + _LONGEST_END
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class Channel:
    """One process set's operations, from submission to completion."""

    def __init__(
        self,
        set_id: int,
        group: Group,
        executor: Executor,
        trace: Trace,
        change_process_sets: Callable[[Request], Any],
        on_loss: Callable[[Sequence[int]], None],
        background_core: int | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.set_id = set_id
        self.group = group
        self.failure: HorovodInternalError | None = None
        self.counters = counters  # None: nobody counts
        self.num_joins = 0  # times that ranks had joined, and all have gone on
        self.tuned: tuple[float, str | None] | None = None  # what autotuning has settled on
        self._executor = executor
        self._transport = executor.transport
        self._trace = trace
        self._change_process_sets = change_process_sets
        self._on_loss = on_loss  # told the ranks of the world because of which operations fail
        self._background_core = background_core
        self._threshold = group.config.fusion_threshold
        self._fuse_groups = not group.config.disable_group_fusion
        self._cycle = group.config.cycle_time / 1000
        self._ranges = Ranges(group.config)
        self._inline: tuple[str, float, FrameType] | None = (
            None  # what `InlineReduction` is made of
        )
        self._queue: list[Request] = []
        self._in_flight: dict[str, Request] = {}
        self._unnamed: dict[Kind, int] = {}
        self._queue_lock = threading.Lock()  # queue, names, failure: held for moments
        self._drive_lock = threading.Lock()  # held by the thread that runs a round
        self._progress = threading.Condition()
        self._waiters = 0  # threads that wait for what another one drives
        self._pause = self._cycle
        self._pausing = threading.Event()
        self._join_state = JoinState()
        self._bell = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- submitting ------------------------------------------------------------------------

    def auto_name(self, kind: Kind) -> str:
        """A name for an unnamed request: ranks that submit alike count alike."""
        with self._queue_lock:
            number = self._unnamed.get(kind, 0) + 1
            self._unnamed[kind] = number
        return f"noname.{number}"

    def submit(self, request: Request, background: bool = True) -> Request:
        """Queue a request. With `background` false the caller will wait for it at once."""
        with self._queue_lock:
            if self.failure is not None:
                raise fresh_copy(self.failure)
            if request.name in self._in_flight:
                earlier = self._in_flight[request.name]
                raise ValueError(
                    f"{request.name!r} was submitted at {earlier.source} and has not finished; "
                    f"wait for it, or give this one another name"
                )
            self._in_flight[request.name] = request
            self._queue.append(request)
        timeline = self._trace.timeline
        if timeline is not None:
            timeline.negotiate_start(request.name, request.label)
        if not self._pausing.is_set():
            self._pausing.set()
        if background and not self._bell.is_set():
            self._start_background()
            self._bell.set()
        return request

    @property
    def queue_length(self) -> int:
        """Requests that have not run."""
        return len(self._queue)

    @property
    def crosses_hosts(self) -> bool:
        """Whether reducing means waiting for a network."""
        return self._transport.crosses_hosts

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The ways to reduce among which `tune` chooses; the first is used at the beginning."""
        return self._transport.algorithms

    def tune(self, cycle_time: float, algorithm: str | None) -> None:
        """Run operations in this way from now on (milliseconds; None: no choice). Collective."""
        self._cycle = cycle_time / 1000
        if algorithm is not None:
            # In the sequence of operations: all ranks must do the same ones in the same way.
            name = f"{Kind.ALGORITHM.value}.change"
            signature = signature_of(Kind.ALGORITHM, name, (), detail=algorithm)
            request = Request(self, Kind.ALGORITHM, name, signature, detail=algorithm)
            self.submit(request, background=False).wait()

    def pending(self) -> list[Request | InlineReduction]:
        """What has been submitted and has not run, oldest first."""
        inline = self._inline
        with self._queue_lock:
            return (
                [InlineReduction(*inline), *self._queue]
                if inline is not None
                else list(self._queue)
            )

    def allreduce_inline(self, vector: Sequence[torch.Tensor], prepared: PreparedAllreduce) -> bool:
        """Reduce CPU tensors in place, if nothing else is in the way; whether that was so.

        What a request would go through, without the request: for a blocking call with an empty
        queue. If the other ranks turn out to be about something else, it becomes one after all.
        """
        if self._queue or self.failure is not None or self._trace.timeline is not None:
            return False
        if self._ranges.always or profiler_records():  # then as a request, which is watched
            return False
        if len(vector) > 1 and not (self._transport.vectored and len(vector) <= MAX_TENSORS):
            return False
        if not self._drive_lock.acquire(blocking=False):
            return False
        request = None
        try:
            began = time.monotonic()
            self._inline = prepared.name, began, sys._getframe(2)
            if self._transport.agree(prepared.signature, vector):
                counters = self.counters
                if counters is None:
                    self._transport.allreduce_vector(
                        vector, prepared.plain, prepared.scale, prepared.wire
                    )
                    return True
                met = time.monotonic()
                self._transport.allreduce_vector(
                    vector, prepared.plain, prepared.scale, prepared.wire
                )
                counters.reduce += time.monotonic() - met
                counters.wait += met - began
                counters.operations += 1
                counters.bytes_inline += prepared.nbytes
                if prepared.saved:
                    counters.save(prepared.saved)
                return True
            self._waited(began)
            self._inline = None
            request = prepared.request(vector)
            with self._queue_lock:
                self._in_flight[prepared.name] = request
                self._queue.insert(0, request)
            self._settle()
        except BaseException as error:
            failure = self._break(error)
            if isinstance(error, Exception):
                raise failure from error
            raise
        finally:
            self._inline = None
            self._drive_lock.release()
            self._tell_waiters()
        request.wait()
        return True

    # -- driving ---------------------------------------------------------------------------

    def drive(self, request: Request) -> None:
        """Run rounds until `request` is finished."""
        while not request.finished:
            if not self._drive_lock.acquire(blocking=False):
                with waiting(request):
                    self._await(request)
                continue
            try:
                if not request.finished and self._queue:
                    self._guarded_round()
            finally:
                self._drive_lock.release()
                self._tell_waiters()

    def _await(self, request: Request) -> None:
        """While another thread runs rounds: until it has finished `request`, or has stopped."""
        with self._waiting(), self._awaiting():
            while not request.finished and self._drive_lock.locked():
                self._progress.wait()

    def wait_beside(self, request: Request, seconds: float) -> None:
        """Wait for a request that the background thread runs, and for none that follow it.

        For `seconds` at most. Whoever drives runs all that the ranks agree on.
        """
        with self._waiting(), self._awaiting():
            if not request.finished:
                self._progress.wait(seconds)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._progress:
            self._waiters += 1
            try:
                yield
            finally:
                self._waiters -= 1

    @contextmanager
    def _awaiting(self) -> Iterator[None]:
        """What the background thread does meanwhile is waited for, not hidden."""
        counters = self.counters
        before = 0.0 if counters is None else counters.in_background()
        try:
            yield
        finally:
            if counters is not None:
                counters.awaited += counters.in_background() - before

    def _waited(self, since: float) -> None:
        """The time since then went by until all ranks were there."""
        if self.counters is not None:
            self.counters.wait += time.monotonic() - since

    def _tell_waiters(self) -> None:
        """A request is finished, or nobody runs rounds: whoever waits for that looks again."""
        if self._waiters:
            with self._progress:
                self._progress.notify_all()

    def _start_background(self) -> None:
        with self._queue_lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._background, name=f"horovod-set{self.set_id}", daemon=True
                )
                _threads.add(self._thread)
                self._thread.start()

    def _background(self) -> None:
        if self._background_core is not None:
            os.sched_setaffinity(0, {self._background_core})  # of this thread alone
        while not self._is_closed():
            self._bell.wait()
            if self._queue:
                self._let_gather()
            self._bell.clear()
            while self._queue and not self._is_closed():
                with self._drive_lock:
                    if self._queue:
                        self._background_round()
                self._tell_waiters()

    def _background_round(self) -> None:
        """A round that the program does not wait for, unless it says so (`_awaiting`)."""
        counters = self.counters
        if counters is None:
            self._guarded_round()
            return
        before = counters.wait + counters.reduce
        counters.background_since = time.monotonic()
        try:
            self._guarded_round()
        finally:
            counters.background += counters.wait + counters.reduce - before
            counters.background_since = 0.0

    def _is_closed(self) -> bool:
        return self._closed

    def _let_gather(self) -> None:
        """Wait while requests keep coming: one round then serves many, and disturbs nobody."""
        for _ in range(_LONGEST_GATHERING):
            before = len(self._queue)
            time.sleep(self._cycle)
            if len(self._queue) <= before or self._closed:
                return

    def _guarded_round(self) -> None:
        try:
            self._round()
        except BaseException as error:
            self._break(error)
            if not isinstance(error, Exception):
                raise

    def _break(self, error: BaseException) -> HorovodInternalError:
        """A round failed: so does everything else, here and on the other ranks."""
        if isinstance(error, HorovodInternalError):
            failure = error
        else:
            me = self.group.describe(self.group.rank)
            failure = HorovodInternalError(f"{me} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self.abort(failure)
        return failure

    def _round(self) -> None:
        """Agree with the other ranks on what to run next, and run it."""
        pending = self._queue[:MAX_WORDS]
        timeline = self._trace.timeline
        if timeline is not None:
            timeline.mark_cycle()
        elif len(pending) == 1 and pending[0].plain and not self._ranges.wanted():
            self._round_of_one(pending[0])
            return
        batches = plan(before_join(pending), self._threshold, self._fuse_groups)
        preload = self._executor.preload(batches[0]) if batches else None
        words = b"".join([request.signature for request in pending])
        began = time.monotonic()
        common = self._executor.transport.agree(words, preload)
        self._waited(began)
        if common < len(pending):
            pending = pending[:common]
            batches = plan(before_join(pending), self._threshold, self._fuse_groups)
        if batches:
            self._pause = self._cycle
            self._run(before_join(pending), batches)
        else:
            self._settle()

    def _round_of_one(self, request: Request) -> None:
        """The same for one tensor in host memory, with as few steps as Python allows."""
        transport, output = self._executor.transport, request.outputs[0]
        if request.tensors[0] is not output:
            output.copy_(request.tensors[0])
        vector = request.outputs if output.dim() == 1 else [output.view(-1)]
        began = time.monotonic()
        if transport.agree(request.signature, vector) == 0:
            self._waited(began)
            self._settle()
            return
        met = time.monotonic()
        reduce_(vector, request.op, request.postscale, transport, request.wire)
        counters = self.counters
        if counters is not None:
            counters.reduce += time.monotonic() - met
            counters.wait += met - began
            counters.operations += 1
            self._count(request, output.nbytes)
        with self._queue_lock:
            if self._queue:  # empty if another thread aborted meanwhile
                del self._queue[0]  # nobody else removes, so it is still the first
            self._in_flight.pop(request.name, None)
        request.complete(request.outputs)

    def _settle(self) -> None:
        """No common prefix: look at everybody's whole queue."""
        began = time.monotonic()
        self._pausing.clear()
        with self._queue_lock:
            queue = list(self._queue)
        outcome = negotiate(queue, self.group, self._executor.transport, self._join_state)
        self._waited(began)
        if self.counters is not None:
            num_settled = len(outcome.ready) + len(outcome.failed) + len(outcome.completed)
            self.counters.misses += num_settled
        if outcome.join_ended:
            # Ranks that had joined have used fewer automatic names than the others: all begin anew.
            with self._queue_lock:
                self._unnamed.clear()
            self.num_joins += 1
        for request, error in outcome.failed:
            self._forget([request])
            request.fail(error)
        for request, result in outcome.completed:
            self._forget([request])
            request.complete(result)
        if outcome.ready:
            ready = [r if r.channel is not None else self._adopt(r) for r in outcome.ready]
            self._run(ready, plan(ready, self._threshold, self._fuse_groups))
        if outcome.ready or outcome.failed or outcome.completed:
            self._pause = self._cycle
        else:
            since = time.monotonic()
            if self._pausing.wait(self._pause):
                self._pause = self._cycle
                # Somebody is submitting. The longer the queues, the longer we let them grow.
                time.sleep(min(time.monotonic() - began, _LONGEST_PAUSE))
            else:
                self._pause = min(max(2 * self._pause, 0.001), _LONGEST_PAUSE)
            self._waited(since)

    def _adopt(self, request: Request) -> Request:
        request.channel = self
        return request

    def _run(self, requests: Sequence[Request], batches: Sequence[Batch]) -> None:
        """Run agreed requests. Each stays in the queue until its result is there."""
        timeline = self._trace.timeline
        if timeline is not None:
            for request in requests:
                timeline.negotiate_end(request.name, request.label)
                timeline.start(request.name, request.label)
        left = {request: len(request.tensors) for request in requests}
        for batch in batches:
            began = time.monotonic()
            if self._ranges.wanted():
                with self._ranges.around(batch, self._transport.name):
                    result = self._run_batch(batch)
            else:
                result = self._run_batch(batch)
            if self.counters is not None:
                self.counters.reduce += time.monotonic() - began
                self._count(batch.request, batch.nbytes or size_of(batch.request))
            done = []
            for request, count in batch.requests.items() or ((batch.request, 0),):
                left[request] -= count
                if left[request] == 0 or not batch.requests:
                    done.append(request)
                    if timeline is not None:
                        _end_in(timeline, request)
            if self.counters is not None:
                self.counters.operations += len(done)
            self._forget(done)
            for request in done:
                request.complete(request.outputs if batch.requests else result)
            self._tell_waiters()

    def _run_batch(self, batch: Batch) -> Any:
        request = batch.request
        try:
            if request.kind is Kind.PROCESS_SET:
                return self._change_process_sets(request)
            if request.kind is Kind.ALGORITHM:
                self._transport.use(request.detail)
                return None
            return self._executor.run(batch)
        except HorovodInternalError:
            raise
        except Exception as error:
            me = self.group.describe(self.group.rank)
            raise HorovodInternalError(
                f"{me} failed in {request.name!r} ({request.source}): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _count(self, request: Request, nbytes: int) -> None:
        """So many bytes were moved for this request and others like it."""
        if self.counters is not None and nbytes:
            tensor = request.tensors[0]
            self.counters.count(
                nbytes,
                self._executor.media(tensor),
                request.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER),
                bytes_on_wire(nbytes, tensor.dtype, request.wire),
            )

    def _forget(self, requests: Sequence[Request]) -> None:
        with self._queue_lock:
            if self._queue[: len(requests)] == requests:
                del self._queue[: len(requests)]
            else:
                gone = {id(request) for request in requests}
                self._queue = [r for r in self._queue if id(r) not in gone]
            for request in requests:
                self._in_flight.pop(request.name, None)

    # -- ending ----------------------------------------------------------------------------

    def abort(self, error: HorovodInternalError) -> None:
        """Fail everything here, and everything that other ranks do together with us."""
        if self.failure is None and error.ranks:
            self._on_loss([self.group.global_ranks[rank] for rank in error.ranks])
        with self._queue_lock:
            if self.failure is None:
                self.failure = error
            pending, self._queue = self._queue, []
            self._in_flight.clear()
        self._executor.abort(str(error))
        for request in pending:
            request.fail(error)
        self._pausing.set()
        self._tell_waiters()

    def close(self, error: HorovodInternalError) -> None:
        """Stop: pending requests fail with `error`, the background thread ends."""
        with self._queue_lock:
            if self.failure is None:
                self.failure = error
            pending, self._queue = self._queue, []
            self._in_flight.clear()
        self._closed = True
        self._bell.set()
        self._pausing.set()
        for request in pending:
            request.fail(error)
        self._tell_waiters()
        alone = self._drive_lock.acquire(blocking=False)
        if not alone:
            # Another thread is in a round: wake it, and let go of nothing under its feet.
            self._executor.abort(f"{self.group.describe(self.group.rank)} has shut down Horovod")
            alone = self._drive_lock.acquire(timeout=_LONGEST_GOODBYE)
        try:
            self._executor.close()
        finally:
            if alone:
                self._drive_lock.release()
                self._tell_waiters()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(timeout=_LONGEST_GOODBYE)

    def after_fork_in_child(self) -> None:
        self._executor.after_fork_in_child()


def _end_in(timeline: Timeline, request: Request) -> None:
    if request.tensors:
        timeline.end(request.name, request.tensors[0].dtype, request.tensors[0].shape)
    else:
        timeline.end(request.name)
