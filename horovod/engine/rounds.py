"""The rounds in which the ranks of a process set agree what to run, and run it.

Ranks may submit in any order. In a *round* every rank shows the signatures at the head of its
queue; the longest common prefix runs, fused where it can be. If there is none the ranks
negotiate: they exchange whole queues (`negotiation`). A round needs every rank of the set, so a
rank that has nothing to submit simply is not there yet and the others wait for it.

A channel lets one thread at a time run them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.batches import Batch, before_join, plan
from horovod.engine.executor import Executor, reduce_
from horovod.engine.negotiation import JoinState, negotiate
from horovod.engine.request import Kind, Request, bytes_on_wire
from horovod.engine.request_queue import RequestQueue
from horovod.engine.waiters import Waiters
from horovod.observe.statistics.counters import Counters
from horovod.observe.statistics.operations import size_of
from horovod.observe.statistics.ranges import Ranges, profiler_records
from horovod.transport.base import MAX_WORDS, Group

_LONGEST_PAUSE = 0.02  # seconds between rounds that settled nothing


class Rounds:
    """Takes requests from the queue, together with the other ranks, and completes them."""

    def __init__(
        self, set_id: int, group: Group, executor: Executor, queue: RequestQueue, waiters: Waiters
    ) -> None:
        self.cycle = group.config.cycle_time / 1000  # seconds
        self.counters: Counters | None = executor.counters  # None: nobody counts
        self.ranges = Ranges(group.config)
        self.num_run = 0  # operations so far, the same on all ranks
        self.num_joins = 0  # times that ranks had joined, and all have gone on
        self._set_id = set_id
        self._group = group
        self._executor = executor
        self._transport = executor.transport
        self._trace = executor.trace
        self._queue = queue
        self._waiters = waiters
        self._threshold = group.config.fusion_threshold
        self._fuse_groups = not group.config.disable_group_fusion
        self._pause = self.cycle
        self._join_state = JoinState()

    def run_next(self) -> None:
        """Agree with the other ranks on what to run next, and run it."""
        pending = self._queue.requests[:MAX_WORDS]
        timeline = self._trace.timeline
        if timeline is not None:
            timeline.mark_cycle()
        elif (
            len(pending) == 1
            and pending[0].plain
            and not self._trace.watched
            and not (self.ranges.always or profiler_records())
        ):
            self._run_one(pending[0])
            return
        batches = plan(before_join(pending), self._threshold, self._fuse_groups)
        preload = self._executor.preload(batches[0]) if batches else None
        words = b"".join([request.signature for request in pending])
        began = time.monotonic()
        common = self._transport.agree(words, preload)
        self.waited(began)
        if common < len(pending):
            pending = pending[:common]
            batches = plan(before_join(pending), self._threshold, self._fuse_groups)
        if batches:
            self._pause = self.cycle
            self._run(before_join(pending), batches)
        else:
            self.settle()

    def _run_one(self, request: Request) -> None:
        """The same for one tensor in host memory, with as few steps as Python allows."""
        transport, output = self._transport, request.outputs[0]
        if request.tensors[0] is not output:
            output.copy_(request.tensors[0])
        vector = request.outputs if output.dim() == 1 else [output.view(-1)]
        began = time.monotonic()
        if transport.agree(request.signature, vector) == 0:
            self.waited(began)
            self.settle()
            return
        met = time.monotonic()
        reduce_(vector, request.op, request.postscale, transport, request.wire)
        counters = self.counters
        if counters is not None:
            counters.reduce += time.monotonic() - met
            counters.wait += met - began
            counters.operations += 1
            self._count(request, output.nbytes)
        self.num_run += 1
        self._queue.remove([request])
        request.complete(request.outputs)

    def settle(self) -> None:
        """No common prefix: look at everybody's whole queue."""
        began = time.monotonic()
        self._queue.grown.clear()
        queue = self._queue.copy()
        outcome = negotiate(queue, self._group, self._transport, self._join_state)
        self.waited(began)
        num_settled = len(outcome.ready) + len(outcome.failed) + len(outcome.completed)
        if self.counters is not None:
            self.counters.misses += num_settled
        if outcome.join_ended:
            # Ranks that had joined have used fewer automatic names than the others: all begin anew.
            self._queue.restart_auto_names()
            self.num_joins += 1
        timeline = self._trace.timeline
        if timeline is not None:
            for request, _ in (*outcome.failed, *outcome.completed):
                timeline.negotiate_end(request.name)
        for request, error in outcome.failed:
            self._queue.remove([request])
            request.fail(error)
        for request, result in outcome.completed:
            self._queue.remove([request])
            request.complete(result)
        if outcome.ready:
            self._run(outcome.ready, plan(outcome.ready, self._threshold, self._fuse_groups))
        if num_settled:
            self._pause = self.cycle
        else:
            self._wait_for_more(began)

    def _wait_for_more(self, began: float) -> None:
        """Nothing was settled in a round that began then: not to ask again at once."""
        since = time.monotonic()
        if self._queue.grown.wait(self._pause):
            self._pause = self.cycle
            # Somebody is submitting. The longer the queues, the longer we let them grow.
            time.sleep(min(time.monotonic() - began, _LONGEST_PAUSE))
        else:
            self._pause = min(max(2 * self._pause, 0.001), _LONGEST_PAUSE)
        self.waited(since)

    def _run(self, requests: Sequence[Request], batches: Sequence[Batch]) -> None:
        """Run agreed requests. Each stays in the queue until its result is there."""
        timeline = self._trace.timeline
        agreed = time.perf_counter() if self._trace.watched else 0.0
        first = self.num_run
        if timeline is not None:
            for number, request in enumerate(requests, first):
                timeline.negotiate_end(request.name, agreed, self._set_id, number)
                timeline.start(request.name, request.label, agreed)
        self.num_run += len(requests)
        left = {request: len(request.tensors) for request in requests}
        for batch, following in itertools.zip_longest(batches, batches[1:]):
            began = time.monotonic()
            if self.ranges.always or profiler_records():
                together = list(batch.requests) or [batch.request]
                nbytes = batch.nbytes or size_of(batch.request)
                with self.ranges.around(together, nbytes, self._transport.name):
                    result = self._run_batch(batch)
            else:
                result = self._run_batch(batch)
            if self.counters is not None:
                self.counters.reduce += time.monotonic() - began
                self._count(batch.request, batch.nbytes or size_of(batch.request))
            try:
                if following is not None:
                    # First, so that the link is busy while whoever waited computes.
                    self._attempt(following.request, self._executor.begin, following)
            finally:
                self._complete(batch, result, left)
        if self._trace.shares_arrivals and self._group.size > 1:
            self._share_arrivals(requests, first, agreed)

    def _share_arrivals(self, requests: Sequence[Request], first: int, agreed: float) -> None:
        """Tell the others how long ago we had submitted these, and record when they had.

        All ranks agree at the same time, as far as a message is fast, so what tells how long
        before that needs no clock that they share. After the operations, which must not wait for
        it, and which may already have been sent along with the agreement.
        """
        now = agreed - time.perf_counter() + time.monotonic()
        ages = [round((now - r.submitted) * 1e6) if r.signature else -1 for r in requests]
        everyone = self._executor.gather_numbers(ages)
        timeline = self._trace.timeline
        if timeline is None:
            return
        for index, request in enumerate(requests):
            for rank, theirs in zip(self._group.global_ranks, everyone, strict=True):
                if theirs[index] >= 0:  # not of a rank that has joined
                    ready = agreed - theirs[index] / 1e6
                    timeline.rank_ready(request.name, rank, ready, first + index)

    def _run_batch(self, batch: Batch) -> Any:
        request = batch.request
        if request.change is not None:
            return self._attempt(request, request.change)
        return self._attempt(request, self._executor.run, batch)

    def _attempt(self, request: Request, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do that, and say in whose course something went wrong."""
        try:
            return act(*arguments)
        except HorovodInternalError:
            raise
        except Exception as error:
            me = self._group.describe(self._group.rank)
            raise HorovodInternalError(
                f"{me} failed in {request.name!r} ({request.source}): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _complete(self, batch: Batch, result: Any, left: dict[Request, int]) -> None:
        """Complete the requests of which nothing is `left` to be done after this batch."""
        timeline = self._trace.timeline
        done = []
        for request, count in batch.requests.items() or ((batch.request, 0),):
            left[request] -= count
            if left[request] == 0 or not batch.requests:
                done.append(request)
                if timeline is not None:
                    timeline.end(request.name, request.tensors)
        if self.counters is not None:
            self.counters.operations += len(done)
        self._queue.remove(done)
        for request in done:
            request.complete(request.outputs if batch.requests else result)
        self._waiters.tell()

    # -- counting --------------------------------------------------------------------------

    def waited(self, since: float) -> None:
        """The time since then went by until all ranks were there."""
        if self.counters is not None:
            self.counters.wait += time.monotonic() - since

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
