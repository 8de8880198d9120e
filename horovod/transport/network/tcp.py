"""Collectives over TCP, straight from Python. Called by the transport selection.

The kernel does most of what a network engine does: it sends and receives while Python computes, and
gathers and scatters memory. So a collective works directly on its sockets (`streams`, `links`): no
second thread has to be woken for every message, and nothing is copied into buffers of an engine.
Measured between two hosts this is faster than torch's Gloo at every size
(`benchmarks/network.py`).

- Agreement, and tensors so small that they travel with it: every rank gets every rank's record
  (`records`) in log2(size) rounds, and reduces for itself, in rank order.
- Few ranks: each collects and reduces its share of the tensors, block by block, and sends out every
  finished block while later ones are still arriving (`direct_reduction`).
- Many ranks: reduce-scatter and allgather among ranks at distances 1, 2, 4, ... (`pairwise`).

When a connection ends, the reason is found out (`lost_connections`). Then this rank shuts down its
own connections, so that the news reaches every rank, whichever peer it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod.common.exceptions import HorovodInternalError, fresh_copy
from horovod.common.reduce_op import ReduceOp
from horovod.transport import pairwise
from horovod.transport.arithmetic import ignore_overflow
from horovod.transport.base import WORD, Group, count_common_words
from horovod.transport.division import as_bytes
from horovod.transport.eight_bits import is_coded
from horovod.transport.network.coded_reduction import CodedReduction, add_up_among_many
from horovod.transport.network.direct_reduction import DirectReduction
from horovod.transport.network.links import Links, connection_failure
from horovod.transport.network.lost_connections import explain_absence, explain_end
from horovod.transport.network.records import (
    bundle,
    payload_of,
    record_head,
    reduce_payloads,
    unbundle,
    words_of,
)
from horovod.transport.network.reduction_memory import ReductionMemory, widen
from horovod.transport.network.streams import Incoming, MessageStream, Outgoing, finish
from horovod.transport.pairwise import PairwiseTransport

INLINE = 64 * 1024  # bytes that may travel with an agreement
INLINE_TOTAL = 256 * 1024  # ... as long as all that arrives at one rank stays below this
RECORD = 8 * 1024  # bytes up to which fewer messages gather faster than more direct ones
_LEAVE_SECONDS = 1.0  # in which others may finish reading from a rank that closes


class _Preload(NamedTuple):
    """What was sent along with an agreement."""

    tensors: Sequence[torch.Tensor]  # the list object that was announced
    payloads: list[Any]  # of all ranks, in rank order


class TcpTransport(PairwiseTransport):
    """The transport of ranks that reach each other over TCP."""

    name = "TCP"
    crosses_hosts = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.vectored = self.sends_ahead = group.size <= pairwise.DIRECT
        self._calls = threading.Lock()  # held during a collective
        self._streams: dict[int, MessageStream] = {}
        self._memory = ReductionMemory(group.size)
        self._preloaded: _Preload | None = None
        self._widening: Callable[[], None] | None = None  # copies the result out of a narrower type
        # Ranks send their records before they read: none may be so long that two of them wait for
        # each other to read.
        self._inline = min(INLINE, INLINE_TOTAL // group.size)
        self._links: Links | None = None
        self._deadline: float | None = None  # of the ranks' first meeting, while it lasts
        seconds = group.config.gloo_timeout_seconds
        try:
            self._links = Links(group, self._on_end)
            self._links.connect(self._neighbours(), seconds)
            self._meet(2 * seconds)  # a rank that waits for another one gives up before that
        except (OSError, ValueError, TimeoutError) as error:
            self._close_now()
            # A peer may have failed meanwhile, which the thread of `Links` has noticed.
            known = self._failure
            raise (fresh_copy(known) if known else connection_failure(group, error)) from error
        except HorovodInternalError:
            self._close_now()
            raise

    def _meet(self, seconds: float) -> None:
        """Wait until all ranks have connected; raise if one does not, or if a connection ends."""
        self.group.store.set(f"connected/{self.rank}", b"")
        self._deadline = time.monotonic() + seconds
        self.barrier()
        self._deadline = None

    def _neighbours(self) -> list[int]:
        """Return the ranks that collectives talk to: all, or those at distances 1, 2, 4, ..."""
        if self.size <= pairwise.DIRECT:
            return list(self._peers)
        return sorted(
            {
                (self.rank + sign * (1 << power)) % self.size
                for power in range((self.size - 1).bit_length())
                for sign in (1, -1)
            }
        )

    # -- messages --------------------------------------------------------------------------

    def _stream(self, rank: int) -> MessageStream:
        """Return the stream of messages to and from a rank; connect to it first if needed."""
        stream = self._streams.get(rank)
        if stream is None:
            assert self._links is not None
            stream = self._streams[rank] = MessageStream(self._links.to(rank))
        return stream

    def _send(self, data: torch.Tensor, rank: int) -> Outgoing:
        return self._stream(rank).send([data.numpy()], data.numel())

    def _receive(self, data: torch.Tensor, rank: int) -> Incoming:
        return self._stream(rank).receive([data.numpy()], data.numel())

    def _finish(self, pending: list[Any]) -> None:
        if pending:
            finish(
                self._streams.values(),
                lambda: all(message.done for message in pending),
                self._deadline,
            )

    def find_awaited(self) -> list[int]:
        return [rank for rank, stream in list(self._streams.items()) if stream.awaits_peer()]

    # -- agreement -------------------------------------------------------------------------

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        self._preloaded = None
        with self._guard():
            payload = None if preload is None else self._payload(preload)
            head = record_head(words, payload)
            records = self._gather(head if payload is None else head + payload)
            length = len(head)
            if all(record[:length] == head for record in records):
                if preload is not None and payload is not None:
                    self._preloaded = _Preload(preload, [record[length:] for record in records])
                return len(words) // WORD
            return count_common_words([words_of(record) for record in records])

    def _payload(self, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Return the content of tensors if they are small enough to be sent along."""
        nbytes = sum([tensor.nbytes for tensor in tensors])
        return None if nbytes > self._inline else payload_of(tensors)

    def _gather(self, record: bytes) -> list[Any]:
        """Return every rank's record, in rank order.

        After each round a rank has the records of twice as many ranks, those that follow it.
        """
        if self.size == 2:
            theirs = self._swap(1 - self.rank, 1 - self.rank, record)
            return [record, theirs] if self.rank == 0 else [theirs, record]
        records: list[Any] = [record]  # of this rank and those that follow it
        distance = 1
        while distance < self.size:
            passed = records[: self.size - distance]
            arrived = self._swap(
                (self.rank - distance) % self.size,
                (self.rank + distance) % self.size,
                bundle(passed),
            )
            records += unbundle(arrived, len(passed))
            distance *= 2
        return records[self.size - self.rank :] + records[: self.size - self.rank]

    def _swap(self, target: int, source: int, data: bytes) -> memoryview:
        """Send a message to rank `target`, and return the message of rank `source`."""
        sending, receiving = self._stream(target), self._stream(source)
        sent = sending.send([data], len(data))
        awaited = receiving.receive(None, None)
        sending.push()
        if sent.done and receiving is sending:
            receiving.pull(0)
        finish(
            (sending,) if receiving is sending else (sending, receiving),
            lambda: sent.done and awaited.done,
        )
        return memoryview(awaited.body)

    # -- gathering -------------------------------------------------------------------------

    def gather_bytes(self, content: bytes) -> list[bytes]:
        with self._guard():
            return [bytes(record) for record in self._gather(content)]

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        if self.size > pairwise.DIRECT or max(counts) * source.element_size() > RECORD:
            super().allgather(source, output, counts)
            return
        with self._guard():
            content = b"".join(self._gather(payload_of([source])))
            if content:
                as_bytes(output).numpy()[:] = np.frombuffer(content, np.uint8)

    # -- reducing --------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        self.allreduce_vector([tensor], op)

    @ignore_overflow
    def allreduce_vector(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        preloaded, self._preloaded = self._preloaded, None
        wire = _usable(wire, op)
        nbytes = sum([tensor.nbytes for tensor in tensors])
        if is_coded(wire) and self.size > pairwise.DIRECT and nbytes > self._inline:
            add_up_among_many(self, tensors[0], scale, wire)
            return
        with self._guard():
            if preloaded is not None and preloaded.tensors is tensors:
                reduce_payloads(preloaded.payloads, tensors, op, scale)
                return
            if not nbytes:
                return
            if nbytes <= self._inline:
                reduce_payloads(self._gather(payload_of(tensors)), tensors, op, scale)
            elif is_coded(wire):
                self._begin_coded(tensors, scale, wire)
                finish(self._streams.values())
            elif wire is not None:
                narrow = self._memory.narrow(tensors, wire)
                self._reduce([narrow], op, 1.0)
                widen(narrow, tensors, scale)
            else:
                self._reduce(tensors, op, scale)

    def _reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float) -> None:
        """Reduce tensors that are too large to be gathered."""
        if self.size <= pairwise.DIRECT:
            self._begin_directly(tensors, op, scale)
            finish(self._streams.values())
        else:
            (tensor,) = tensors
            self._reduce_by_rounds(tensor, op)
            if scale != 1.0:
                tensor.mul_(scale)

    @ignore_overflow
    def begin_allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        """Begin an allreduce: the kernel sends what fits into its buffers after we return."""
        self._preloaded = None
        wire = _usable(wire, op)
        is_small = sum([tensor.nbytes for tensor in tensors]) <= self._inline
        if self.size > pairwise.DIRECT or is_small:
            super().begin_allreduce(tensors, op, scale, wire)
            return
        with self._guard():
            if wire is None:
                self._begin_directly(tensors, op, scale)
            elif is_coded(wire):
                self._begin_coded(tensors, scale, wire)
            else:
                narrow = self._memory.narrow(tensors, wire)
                self._widening = partial(widen, narrow, tensors, scale)
                self._begin_directly([narrow], op, 1.0)
            for stream in self._streams.values():
                stream.push()

    @ignore_overflow
    def finish_allreduce(self) -> None:
        if self._begun_allreduce is not None:
            super().finish_allreduce()
            return
        with self._guard():
            finish(self._streams.values())
            if self._widening is not None:
                self._widening()
                self._widening = None

    def _begin_directly(self, tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float) -> None:
        """Queue the messages of an allreduce among few ranks."""
        streams = {peer: self._stream(peer) for peer in self._peers}
        scratch = partial(self._memory.block, tensors[0].dtype)
        blocks = self._memory.blocks(tensors)
        DirectReduction(self.rank, streams, blocks, tensors, op, scale, scratch).begin()

    def _begin_coded(
        self, tensors: Sequence[torch.Tensor], scale: float, kind: torch.dtype
    ) -> None:
        """Queue the messages of a sum that travels in 8 bits, among few ranks."""
        plan = self._memory.coded_plan(tensors, self.rank, kind)
        streams = {peer: self._stream(peer) for peer in self._peers}
        CodedReduction(self.rank, streams, plan, tensors, scale).begin()

    # -- failure ---------------------------------------------------------------------------

    @contextmanager
    def _guard(self) -> Iterator[None]:
        with self._calls:
            try:
                with super()._guard():
                    yield
            finally:
                self._reset_if_broken()

    def _reset_if_broken(self) -> None:
        """Reset the connections of a broken transport, which wakes the peers that wait for us.

        The caller holds `_calls`, so no collective uses the connections any more.
        """
        if self._failure is not None and self._links is not None:
            self._links.reset()

    def _explain(self, error: BaseException) -> HorovodInternalError:
        if self._failure is not None:
            return self._failure
        if not isinstance(error, OSError):
            return super()._explain(error)
        if isinstance(error, TimeoutError) and self._deadline is not None:
            return explain_absence(self.group, self._peers, error)
        return explain_end(self.group, self._links, self._board, error)

    def _on_end(self, rank: int, error: OSError | None) -> None:
        """Break the transport when a connection has ended, even if no call waits for it."""
        if self._failure is None and not self._board.said_goodbye(rank):
            self._break(explain_end(self.group, self._links, self._board, error))

    def _wake(self, failure: HorovodInternalError) -> None:
        if self._links is not None:
            self._links.shut_down()
            # A thread in a collective holds the lock, and resets the connections when it leaves.
            if self._calls.acquire(blocking=False):
                self._reset_if_broken()
                self._calls.release()

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._calls.acquire(blocking=False):
            self._break(HorovodInternalError("Horovod was shut down during a collective"))
            self._calls.acquire()
        try:
            if self._shut():
                self._board.say_goodbye()
            self._close_now()
        finally:
            self._calls.release()

    def _close_now(self) -> None:
        """Close the connections and drop all memory."""
        self._closed = True
        if self._links is not None:
            self._links.close(_LEAVE_SECONDS)
        self._streams.clear()
        self._memory.clear()
        self._preloaded = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def after_fork_in_child(self) -> None:
        if self._links is not None:
            self._links.after_fork_in_child()
        self._closed = True
        self._failure = HorovodInternalError("a forked child takes no part in collectives")


def _usable(wire: torch.dtype | None, op: ReduceOp) -> torch.dtype | None:
    """Return the narrower type to use for an operation: in 8 bits ranks can only add up."""
    return None if is_coded(wire) and op is not ReduceOp.SUM else wire
