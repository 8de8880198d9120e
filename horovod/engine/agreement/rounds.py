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
from horovod.engine.agreement.negotiation import JoinState, negotiate
from horovod.engine.agreement.request_queue import RequestQueue
from horovod.engine.agreement.waiters import Waiters
from horovod.engine.collective import Kind
from horovod.engine.execution.batches import Batch, before_join, plan
from horovod.engine.execution.executor import Executor, reduce_
from horovod.engine.request import Request, bytes_on_wire
from horovod.observe.statistics.operations import size_of
from horovod.transport.base import MAX_WORDS, Group

_LONGEST_PAUSE = 0.02  # seconds between rounds that settled nothing


class Rounds:
    """Takes requests from the queue, together with the other ranks, and completes them."""

    def __init__(
        self, group: Group, executor: Executor, queue: RequestQueue, waiters: Waiters
    ) -> None:
        self.cycle = group.config.cycle_time / 1000  # seconds
        self.num_run = 0  # operations that have run so far, in an order that is the same everywhere
        self.num_joins = 0  # times that ranks had joined, and all have gone on
        self._group = group
        self._executor = executor
        self._transport = executor.transport
        self._observer = executor.observer
        self._queue = queue
        self._waiters = waiters
        self._threshold = group.config.fusion_threshold
        self._fuse_groups = not group.config.disable_group_fusion
        self._pause = self.cycle
        self._join_state = JoinState()

    def run_next(self) -> None:
        """Agree with the other ranks on what to run next, and run it."""
        pending = self._queue.requests[:MAX_WORDS]  # no lock needed: others only append
        if len(pending) == 1 and pending[0].plain and not self._observer.is_watching():
            self._run_one(pending[0])
            return
        self._observer.begin_round()
        batches = plan(before_join(pending), self._threshold, self._fuse_groups)
        preload = self._executor.preload(batches[0]) if batches else None
        words = b"".join([request.signature for request in pending])
        began = time.monotonic()
        common = self._transport.agree(words, preload)
        self._observer.waited(began)
        if common < len(pending):
            pending = pending[:common]
            batches = plan(before_join(pending), self._threshold, self._fuse_groups)
        if batches:
            self._pause = self.cycle
            self._run(before_join(pending), batches)
        else:
            self.settle()

    def _run_one(self, request: Request) -> None:
        """Run a request of one tensor in host memory, with as few steps as Python allows."""
        transport, observer, output = self._transport, self._observer, request.outputs[0]
        if request.tensors[0] is not output:
            output.copy_(request.tensors[0])
        vector = request.outputs if output.dim() == 1 else [output.view(-1)]
        began = time.monotonic()
        if transport.agree(request.signature, vector) == 0:
            observer.waited(began)
            self.settle()
            return
        met = observer.waited(began)
        reduce_(vector, request.reduction, transport)
        on_wire = bytes_on_wire(output.nbytes, output.dtype, request.reduction.wire)
        observer.reduced(met, output.nbytes, transport.media, True, on_wire)
        observer.ended((request,))
        self.num_run += 1
        self._queue.remove([request])
        request.complete(request.outputs)

    def settle(self) -> None:
        """Find out from all ranks' whole queues what to run: their heads have nothing in common."""
        began = time.monotonic()
        self._queue.grown.clear()  # before the copy: what comes after it ends `_wait_for_more`
        queue = self._queue.copy()
        outcome = negotiate(queue, self._group, self._transport, self._join_state)
        self._observer.waited(began)
        num_settled = len(outcome.ready) + len(outcome.failed) + len(outcome.completed)
        not_run = [request for request, _ in (*outcome.failed, *outcome.completed)]
        self._observer.settled(num_settled, not_run)
        if outcome.join_ended:
            # Ranks that had joined have used fewer automatic names than the others: all begin anew.
            self._queue.restart_auto_names()
            self.num_joins += 1
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
        """Back off after a round without progress, which began then, instead of asking at once."""
        since = time.monotonic()
        if self._queue.grown.wait(self._pause):
            self._pause = self.cycle
            # Somebody is submitting. The longer the queues, the longer we let them grow.
            time.sleep(min(time.monotonic() - began, _LONGEST_PAUSE))
        else:
            self._pause = min(max(2 * self._pause, 0.001), _LONGEST_PAUSE)
        self._observer.waited(since)

    def _run(self, requests: Sequence[Request], batches: Sequence[Batch]) -> None:
        """Run agreed requests. Each stays in the queue until its result is there."""
        observer, first = self._observer, self.num_run
        agreed = observer.agreed(requests, first)
        left = {request: len(request.tensors) for request in requests}
        for batch, following in itertools.zip_longest(batches, batches[1:]):
            nbytes = batch.nbytes or size_of(batch.request)
            together = batch.requests or (batch.request,)
            began = time.monotonic()
            with observer.running(together, nbytes, self._transport.name):
                result = self._run_batch(batch)
            observer.reduced(began, nbytes, *self._movement(batch.request, nbytes))
            try:
                if following is not None:
                    # Before results are given out, so that the link is busy while waiters compute.
                    self._attempt(following.request, self._executor.begin, following)
            finally:
                self._complete(batch, result, left)
        if observer.trace.shares_arrivals and self._group.size > 1:
            # After the operations, which must not wait for this, and which may already have been
            # sent along with the agreement.
            ages = self._executor.gather_numbers(observer.ages_of(requests, agreed))
            observer.arrived(requests, first, agreed, ages)

    def _movement(self, request: Request, nbytes: int) -> tuple[tuple[str, ...], bool, int]:
        """Return what carries such requests, whether they reduce, and their bytes on a network."""
        if not nbytes:
            return (), False, 0
        tensor = request.tensors[0]
        return (
            self._executor.media(tensor),
            request.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER),
            bytes_on_wire(nbytes, tensor.dtype, request.reduction.wire),
        )

    def _run_batch(self, batch: Batch) -> Any:
        request = batch.request
        if request.change is not None:
            return self._attempt(request, request.change)
        return self._attempt(request, self._executor.run, batch)

    def _attempt(self, request: Request, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call `act`, and say in an error during which request it went wrong."""
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
        done = []
        for request, count in batch.requests.items() or ((batch.request, 0),):
            left[request] -= count
            if left[request] == 0 or not batch.requests:
                done.append(request)
        self._observer.ended(done)
        self.num_run += len(done)
        self._queue.remove(done)
        for request in done:
            request.complete(request.outputs if batch.requests else result)
        self._waiters.tell()
