"""Collectives over TCP, straight from Python. Called by the transport selection.

The kernel does most of what a network engine does: it sends and receives while Python computes, and
gathers and scatters memory. So nothing stands between a collective and its sockets (`streams`,
`links`): no second thread to wake up for every message, no copy into buffers of an engine. Measured
between two hosts that is faster than torch's Gloo at every size (`benchmarks/network.py`).

- Agreement, and tensors so small that they travel with it: everybody gets everybody's record, in
  the logarithm of the number of ranks of rounds, and reduces for itself, in the order of ranks.
- Few ranks: each collects and reduces its share of the tensors, block by block, and sends out every
  finished block while later ones are still arriving.
- Many ranks: reduce-scatter and allgather among ranks at distances 1, 2, 4, ... (`pairwise`).

When a connection ends, somebody has died, aborted or closed. Who and why comes, in this order, from
what was posted in the store (`failures`), from which connections are dead and which processes of
this host are. Then our own connections are shut down, so that the news reaches everybody whoever
they wait for.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import string_at
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.common.reduce_op import ReduceOp
from horovod.transport import pairwise
from horovod.transport.arithmetic import NUMPY_TYPES, as_blocks, quietly, reduce_into
from horovod.transport.base import WORD, Group
from horovod.transport.coded_reduction import CodedReduction, add_up_among_many, plan_rows
from horovod.transport.direct_reduction import AHEAD, BlockBuffer, DirectReduction
from horovod.transport.eight_bits import ROW, is_coded, num_rows
from horovod.transport.links import Links, failed_to_connect
from horovod.transport.pairwise import PairwiseTransport
from horovod.transport.shares import SharePlan, whole
from horovod.transport.streams import Incoming, MessageStream, Outgoing, finish

INLINE = 64 * 1024  # bytes that may travel with an agreement
INLINE_TOTAL = 256 * 1024  # ... as long as all that arrives at one rank stays below this
BLOCK_TOTAL = 4 * 1024 * 1024  # bytes of one block, from all ranks together
SMALLEST_BLOCK = 128 * 1024
BLOCKS = 4  # of a share, at least: the results of one travel while the next arrive
_LEAVE_SECONDS = 1.0  # how long a closing rank lets the others finish what they read from it
_KEPT = 256  # plans that are remembered
_ABSENT = (1 << 64) - 1  # a record without payload
_RECORD = struct.Struct("<QQ")  # bytes of words, bytes of payload


class _Preload(NamedTuple):
    """What was sent along with an agreement."""

    tensors: Sequence[torch.Tensor]  # the very list that was announced
    payloads: list[Any]  # everybody's, in the order of ranks


class TcpTransport(PairwiseTransport):
    """The transport of ranks that reach each other over TCP."""

    name = "TCP"
    crosses_hosts = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.vectored = self.sends_ahead = group.size <= pairwise.DIRECT
        self._calls = threading.Lock()  # held during a collective
        self._streams: dict[int, MessageStream] = {}
        self._plans: OrderedDict[tuple[Any, ...], SharePlan] = OrderedDict()
        self._block_buffers: dict[tuple[Any, ...], BlockBuffer] = {}
        self._block = BLOCK_TOTAL // group.size // 64 * 64
        self._preloaded: _Preload | None = None
        self._narrow = torch.empty(0)
        self._rows = torch.empty(0, ROW, dtype=torch.uint8)
        self._widening: Callable[[], None] | None = None  # of what was begun in a narrower type
        # Whoever sends much at once must not wait for a peer that sends to it at the same time.
        self._inline = min(INLINE, INLINE_TOTAL // group.size)
        self._links: Links | None = None
        seconds = group.config.gloo_timeout_seconds
        try:
            self._links = Links(group, self._on_end)
            self._links.connect(self._neighbours(), seconds)
            self.barrier()  # everybody is here, or somebody's connections end
        except (OSError, ValueError, TimeoutError) as error:
            self._close_now()
            raise failed_to_connect(group, error) from error
        except HorovodInternalError:
            self._close_now()
            raise

    def _neighbours(self) -> list[int]:
        """The ranks that collectives talk to: all, or those at distances 1, 2, 4, ..."""
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
            finish(self._streams.values(), lambda: all(message.done for message in pending))

    # -- agreement -------------------------------------------------------------------------

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        self._preloaded = None
        with self._guard():
            payload = None if preload is None else self._payload(preload)
            head = _RECORD.pack(len(words), _ABSENT if payload is None else len(payload)) + words
            records = self._gather(head if payload is None else head + payload)
            length = len(head)
            if all(record[:length] == head for record in records):
                if preload is not None and payload is not None:
                    self._preloaded = _Preload(preload, [record[length:] for record in records])
                return len(words) // WORD
            return _common_words(records)

    def _payload(self, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """The content of tensors that are small enough to be sent along."""
        if sum([tensor.nbytes for tensor in tensors]) > self._inline:
            return None
        return b"".join([string_at(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])

    def _gather(self, record: bytes) -> list[Any]:
        """Everybody's record, in the order of ranks.

        After each round a rank has the records of twice as many ranks, those that follow it.
        """
        if self.size == 2:
            theirs = self._swap(1 - self.rank, 1 - self.rank, record)
            return [record, theirs] if self.rank == 0 else [theirs, record]
        held: list[Any] = [record]
        distance = 1
        while distance < self.size:
            passed = held[: self.size - distance]
            lengths = struct.pack(f"<{len(passed)}Q", *map(len, passed))
            arrived = self._swap(
                (self.rank - distance) % self.size,
                (self.rank + distance) % self.size,
                b"".join((lengths, *passed)),
            )
            held += _unbundle(arrived, len(passed))
            distance *= 2
        return held[self.size - self.rank :] + held[: self.size - self.rank]

    def _swap(self, target: int, source: int, data: bytes) -> memoryview:
        """Send a message to one rank, and what another sends us."""
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

    # -- reducing --------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        self.allreduce_vector([tensor], op)

    @quietly
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
                _reduce_payloads(preloaded.payloads, tensors, op, scale)
                return
            if not nbytes:
                return
            if nbytes <= self._inline:
                payload = self._payload(tensors)
                assert payload is not None
                _reduce_payloads(self._gather(payload), tensors, op, scale)
            elif is_coded(wire):
                self._begin_coded(tensors, scale, wire)
                finish(self._streams.values())
            elif wire is not None:
                narrow = self._narrowed(tensors, wire)
                self._reduce([narrow], op, 1.0)
                _widen(narrow, tensors, scale)
            else:
                self._reduce(tensors, op, scale)

    def _reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float) -> None:
        if self.size <= pairwise.DIRECT:
            self._begin_directly(tensors, op, scale)
            finish(self._streams.values())
        else:
            (tensor,) = tensors
            self._reduce_by_rounds(tensor, op)
            if scale != 1.0:
                tensor.mul_(scale)

    def _narrowed(self, tensors: Sequence[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
        """Everything as one tensor of a narrower type, good until the next one."""
        count = sum([tensor.numel() for tensor in tensors])
        if self._narrow.dtype is not wire or self._narrow.numel() < count:
            self._narrow = torch.empty(count, dtype=wire)
        narrow = self._narrow[:count]
        for part, tensor in _parts(narrow, tensors):
            part.copy_(tensor)
        return narrow

    @quietly
    def begin_allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        """The kernel sends what fits into its buffers while the caller does something else."""
        self._preloaded = None
        wire = _usable(wire, op)
        small = sum([tensor.nbytes for tensor in tensors]) <= self._inline
        if self.size > pairwise.DIRECT or small:
            super().begin_allreduce(tensors, op, scale, wire)
            return
        with self._guard():
            if wire is None:
                self._begin_directly(tensors, op, scale)
            elif is_coded(wire):
                self._begin_coded(tensors, scale, wire)
            else:
                narrow = self._narrowed(tensors, wire)
                self._widening = partial(_widen, narrow, tensors, scale)
                self._begin_directly([narrow], op, 1.0)
            for stream in self._streams.values():
                stream.push()

    @quietly
    def finish_allreduce(self) -> None:
        if self._begun is not None:
            super().finish_allreduce()
            return
        with self._guard():
            finish(self._streams.values())
            if self._widening is not None:
                self._widening()
                self._widening = None

    def _plan(self, tensors: Sequence[torch.Tensor]) -> SharePlan:
        width, counts = tensors[0].dtype.itemsize, tuple([t.numel() for t in tensors])
        plan = self._plans.get((width, counts))
        if plan is None:
            if len(self._plans) >= _KEPT:
                self._plans.popitem(last=False)
            share = sum(counts) * width // self.size
            block = min(self._block, max(SMALLEST_BLOCK, share // BLOCKS // 64 * 64))
            plan = self._plans[width, counts] = SharePlan(counts, width, self.size, block)
        return plan

    def _begin_directly(self, tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float) -> None:
        """Queue the messages of an allreduce among few ranks."""
        streams = {peer: self._stream(peer) for peer in self._peers}
        scratch = partial(self._block_buffer, tensors[0].dtype)
        plan = self._plan(tensors)
        DirectReduction(self.rank, streams, plan, tensors, op, scale, scratch).begin()

    def _begin_coded(
        self, tensors: Sequence[torch.Tensor], scale: float, kind: torch.dtype
    ) -> None:
        """The same for a sum that travels in 8 bits."""
        counts = [tensor.numel() for tensor in tensors]
        plan = plan_rows(counts, self.size)
        rows = self._row_memory(sum(num_rows(count) for count in counts))
        streams = {peer: self._stream(peer) for peer in self._peers}
        CodedReduction(self.rank, streams, plan, tensors, scale, kind, rows).begin()

    def _row_memory(self, count: int) -> torch.Tensor:
        if len(self._rows) < count:
            self._rows = torch.empty(count, ROW, dtype=torch.uint8)
        return self._rows[:count]

    def _block_buffer(self, dtype: torch.dtype, peer: int, slot: int, count: int) -> BlockBuffer:
        """Where so many elements of a peer may arrive."""
        key = (dtype, peer, slot, count)
        buffer = self._block_buffers.get(key)
        if buffer is None:
            if len(self._block_buffers) >= _KEPT:
                self._block_buffers.clear()
            per_peer = AHEAD * self._block
            scratch = self._scratch_for(self.size * per_peer)
            start = peer * per_peer + slot * self._block
            memory = scratch[start : start + count * dtype.itemsize]
            buffer = BlockBuffer(memory.numpy(), as_blocks(memory.view(dtype)))
            self._block_buffers[key] = buffer
        return buffer

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
        """Nobody uses the connections any more: let the others know, whatever they wait for."""
        if self._failure is not None and self._links is not None:
            self._links.reset()

    def _explain(self, error: BaseException) -> HorovodInternalError:
        if self._failure is not None:
            return self._failure
        if not isinstance(error, OSError):
            return super()._explain(error)
        return self._reason(error)

    def _on_end(self, rank: int, error: OSError | None) -> None:
        """The other end of a connection is gone, whether or not anybody here waits for it."""
        if self._failure is None and not self._board.said_goodbye(rank):
            self._break(self._reason(error))

    def _reason(self, error: OSError | None) -> HorovodInternalError:
        """Why a connection has ended."""
        broken = self._broken()  # first: whoever only follows has posted why before it ends them
        posted = self._board.look()
        if posted is not None:
            return posted
        return self._lost(self._broken() if self._board.unreachable else broken, error)

    def _broken(self) -> list[int]:
        """The ranks whose connections have ended."""
        links = self._links
        return [] if links is None else [rank for rank in links.open if links.is_dead(rank)]

    def _lost(self, broken: list[int], error: OSError | None) -> HorovodInternalError:
        """Nobody said why: find out who is gone, of those whose connections have ended."""
        dead = [rank for rank in broken if self._has_died(rank)]
        served = [r for r in broken if self.group.global_ranks[r] == 0]
        if dead:
            lost = dead
        elif self._board.unreachable and served:
            lost = served  # it serves the store, which is gone with it
        else:
            lost = broken[:1]
        if not lost:
            me = self.group.describe(self.rank)
            return HorovodInternalError(f"{me} failed in a collective: {error}")
        said = "; ".join(self._obituary(rank, error) for rank in sorted(lost))
        return PeerLostError(said, sorted(lost))

    def _has_died(self, rank: int) -> bool:
        """Whether it ran where we see processes, and does not any more."""
        assert self._links is not None
        info = self._links.hosts[rank]
        if info.pids != self._links.hosts[self.rank].pids:
            return False
        import psutil  # not before it is needed: starting would take longer

        try:
            return bool(psutil.Process(info.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return True

    def _obituary(self, rank: int, error: OSError | None) -> str:
        assert self._links is not None
        info = self._links.hosts[rank]
        who = f"{self.group.describe(rank)} (pid {info.pid} on {info.host})"
        if self._board.said_goodbye(rank):
            return f"{who} has shut down Horovod"
        if isinstance(error, TimeoutError):
            seconds = self.group.config.gloo_timeout_seconds
            return (
                f"{who} is cut off: it did not answer for {seconds:g} s "
                f"(HOROVOD_GLOO_TIMEOUT_SECONDS)"
            )
        return f"{who} has died or was cut off: its connection is closed"

    def _wake(self, failure: HorovodInternalError) -> None:
        if self._links is not None:
            self._links.shut_down()
            if self._calls.acquire(blocking=False):  # else whoever is in a collective does it
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
        self._closed = True
        if self._links is not None:
            self._links.close(_LEAVE_SECONDS)
        self._streams.clear()
        self._block_buffers.clear()
        self._preloaded = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def after_fork_in_child(self) -> None:
        if self._links is not None:
            self._links.after_fork_in_child()
        self._closed = True
        self._failure = HorovodInternalError("a forked child takes no part in collectives")


def _usable(wire: torch.dtype | None, op: ReduceOp) -> torch.dtype | None:
    """The narrower type to use for an operation: in 8 bits ranks can only add up."""
    return None if is_coded(wire) and op is not ReduceOp.SUM else wire


def _common_words(records: Sequence[Any]) -> int:
    """How many leading words are the same in all records."""
    queues = []
    for record in records:
        nbytes, _ = _RECORD.unpack_from(record)
        queues.append(bytes(record[_RECORD.size : _RECORD.size + nbytes]))
    fewest = min(len(queue) for queue in queues) // WORD
    first = queues[0]
    for number in range(fewest):
        word = first[number * WORD : (number + 1) * WORD]
        if any(queue[number * WORD : (number + 1) * WORD] != word for queue in queues[1:]):
            return number
    return fewest


def _unbundle(data: memoryview, count: int) -> list[memoryview]:
    """The records of a bundle: their lengths come first."""
    records = []
    start = 8 * count
    for length in struct.unpack_from(f"<{count}Q", data):
        records.append(data[start : start + length])
        start += length
    return records


def _parts(
    whole: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a flat tensor that belong to `tensors`, end to end, with those."""
    start = 0
    for tensor in tensors:
        yield whole[start : start + tensor.numel()], tensor.view(-1)
        start += tensor.numel()


def _widen(narrow: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float) -> None:
    for part, tensor in _parts(narrow, tensors):
        tensor.copy_(part)
        if scale != 1.0:
            tensor.mul_(scale)


def _reduce_payloads(
    payloads: Sequence[Any], tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float
) -> None:
    """Reduce what everybody sent, in the order of ranks, into `tensors`."""
    if not payloads[0]:
        return
    dtype = tensors[0].dtype
    kind = NUMPY_TYPES.get(dtype)
    operands: list[Any]
    if kind is not None:
        operands = [np.frombuffer(payload, kind) for payload in payloads]
    else:
        operands = [torch.frombuffer(bytearray(payload), dtype=dtype) for payload in payloads]
    start = 0
    for target in whole(tensors):
        stop = start + len(target)
        reduce_into(target, [operand[start:stop] for operand in operands], op)
        if scale != 1.0:
            target *= scale
        start = stop
