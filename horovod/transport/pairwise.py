"""Collectives composed of sends and receives between pairs of ranks.

For transports that move bytes between two ranks: TCP, and MPI where its own collectives lack data
types or counts. Data travels as bytes, so every data type works; the arithmetic is ours
(`arithmetic`). A slice is reduced by one rank, so results are bitwise the same on all ranks.

- Few ranks, small tensors: every rank sends its whole tensor to every other rank, in one hop.
- Few ranks, large tensors: each rank collects and reduces its own slice, in rank order, piece by
  piece while the next pieces are travelling, then sends the result to all others.
- Many ranks: the same in rounds with ranks at distances 1, 2, 4, ...: equally many bytes, but the
  number of messages grows with the logarithm of the number of ranks. Half precision is rounded once
  in each round.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import as_blocks, ignore_overflow, reduce_into
from horovod.transport.base import Group
from horovod.transport.breakable import BreakableTransport
from horovod.transport.division import as_bytes, cut, offsets_of, split_evenly

WHOLE = 32 * 1024  # bytes up to which an allreduce sends whole tensors
WHOLE_TOTAL = 1024 * 1024  # ... as long as all that arrives at one rank stays below this
PIECE = 4 * 1024 * 1024  # bytes of one message of a pipelined collective
ROUND_PIECE = 512 * 1024  # bytes of one message among many ranks
SCRATCH = 32 * 1024 * 1024  # bytes of arriving pieces kept at a time, over all peers
MESSAGE = 1 << 30  # bytes of the largest message; below every limit on 32-bit counts
DIRECT = 8  # ranks up to which every rank sends to every other


class PairwiseTransport(BreakableTransport):
    """All collectives, made from `_send`, `_receive` and `_finish` of a subclass."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        # Every rank begins with another peer, so that no rank is hit by all others at once.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._scratch = torch.empty(0, dtype=torch.uint8)

    # -- what a subclass provides ----------------------------------------------------------

    @abstractmethod
    def _send(self, data: torch.Tensor, rank: int) -> Any:
        """Begin to send these bytes (1 to MESSAGE of them), which do not change until it is done.

        Returns what `_finish` takes.
        """

    @abstractmethod
    def _receive(self, data: torch.Tensor, rank: int) -> Any:
        """Begin to receive a message of exactly this size; messages of a rank arrive in order.

        Returns what `_finish` takes.
        """

    @abstractmethod
    def _finish(self, pending: list[Any]) -> None:
        """Wait until everything in `pending` is sent or received."""

    # -- collectives -----------------------------------------------------------------------

    @ignore_overflow
    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        with self._guard():
            if not tensor.numel() or self.size == 1:
                return
            if self.size > DIRECT:
                self._reduce_by_rounds(tensor, op)
                return
            if tensor.nbytes <= WHOLE and tensor.nbytes * self.size <= WHOLE_TOTAL:
                reduce_into(tensor, self._exchange(tensor), op)
                return
            slices = cut(tensor, split_evenly(tensor.numel(), self.size))
            self._reduce_slices(slices, slices[self.rank], op)
            self._gather_slices(slices)

    @ignore_overflow
    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        with self._guard():
            if self.size > DIRECT:
                self._reduce_in_rounds(source, counts, op)
                _copy(cut(source, counts)[self.rank], output)
            else:
                self._reduce_slices(cut(source, counts), output, op)

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        with self._guard():
            slices = cut(output, counts)
            _copy(source, slices[self.rank])
            if self.size > DIRECT:
                self._gather_in_rounds(output, counts)
            else:
                self._gather_slices(slices)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Send down a binomial tree, in pieces, so that all levels of the tree work together."""
        with self._guard():
            parent, children = self._tree(root)
            pieces = list(_pieces(as_bytes(tensor), PIECE))
            arriving = [] if parent is None else [self._receive(p, parent) for p in pieces]
            leaving: list[Any] = []
            for index, piece in enumerate(pieces):
                if parent is not None:
                    self._finish([arriving[index]])
                leaving.extend(self._send(piece, child) for child in children)
            self._finish(leaving)

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        with self._guard():
            leaving = cut(source, send_counts)
            arriving = cut(output, receive_counts)
            pending: list[Any] = []
            for peer in reversed(self._peers):
                pending.extend(self._receive_long(arriving[peer], peer))
            for peer in self._peers:
                pending.extend(self._send_long(leaving[peer], peer))
            _copy(leaving[self.rank], arriving[self.rank])
            self._finish(pending)

    def barrier(self) -> None:
        """Exchange tokens in rounds; each doubles the number of ranks known to have arrived."""
        with self._guard():
            token, heard = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
            distance = 1
            while distance < self.size:
                self._finish(
                    [
                        self._receive(heard, (self.rank - distance) % self.size),
                        self._send(token, (self.rank + distance) % self.size),
                    ]
                )
                distance *= 2

    # -- parts -----------------------------------------------------------------------------

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order. They are small and of one length."""
        everyone = [tensor] * self.size
        for peer in self._peers:
            everyone[peer] = torch.empty_like(tensor)
        pending = [self._receive(as_bytes(everyone[peer]), peer) for peer in self._peers]
        mine = as_bytes(tensor)
        pending.extend(self._send(mine, peer) for peer in self._peers)
        self._finish(pending)
        return everyone

    def _reduce_slices(
        self, slices: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp
    ) -> None:
        """Reduce all ranks' data for our slice into `output`, which may be that slice."""
        if self.size == 1:
            _copy(slices[0], output)
            return
        mine = slices[self.rank]
        item = mine.element_size()
        limit = SCRATCH // (2 * len(self._peers)) // 64 * 64
        piece = max(min(PIECE, limit), 64 * 1024) // item  # elements
        rounds = -(-max(part.numel() for part in slices) // piece)
        longest = min(piece, mine.numel())
        halves = self._scratch_for(2 * len(self._peers) * longest * item).view(mine.dtype)
        arrivals = halves.view(2, len(self._peers), longest) if longest else None

        def begin(index: int) -> tuple[list[Any], list[Any]]:
            span = slice(index * piece, (index + 1) * piece)
            count = mine[span].numel()
            receiving = []
            if count and arrivals is not None:
                for number, peer in reversed(list(enumerate(self._peers))):
                    buffer = arrivals[index % 2, number, :count]
                    receiving.append(self._receive(as_bytes(buffer), peer))
            sending = [
                self._send(as_bytes(slices[peer][span]), peer)
                for peer in self._peers
                if slices[peer][span].numel()
            ]
            return receiving, sending

        under_way = [begin(0)] if rounds else []
        for index in range(rounds):
            receiving, sending = under_way.pop()
            if index + 1 < rounds:
                under_way.append(begin(index + 1))
            self._finish(receiving)
            span = slice(index * piece, (index + 1) * piece)
            count = mine[span].numel()
            if count and arrivals is not None:
                operands = [mine[span]] * self.size
                for number, peer in enumerate(self._peers):
                    operands[peer] = arrivals[index % 2, number, :count]
                reduce_into(output[span], operands, op)
            self._finish(sending)

    def _gather_slices(self, slices: Sequence[torch.Tensor]) -> None:
        """Send our slice to all other ranks and receive theirs."""
        pending: list[Any] = []
        for peer in reversed(self._peers):
            pending.extend(self._receive_long(slices[peer], peer))
        for peer in self._peers:
            pending.extend(self._send_long(slices[self.rank], peer))
        self._finish(pending)

    def _reduce_by_rounds(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Do an allreduce in rounds: a reduce-scatter, then an allgather."""
        counts = split_evenly(tensor.numel(), self.size)
        self._reduce_in_rounds(tensor, counts, op)
        self._gather_in_rounds(tensor, counts)

    def _reduce_in_rounds(self, tensor: torch.Tensor, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce our slice of `tensor`; the other slices are left with partial results.

        A rank is responsible for the slices of `reach` ranks, from its own on. In every round it
        sends the farther half of these to the rank whose slice is the first of that half. In
        return it receives, from the rank equally far before it, data for the half that it keeps.
        """
        reach = self.size
        while reach > 1:
            half = 1 << ((reach - 1).bit_length() - 1)
            leaving = self._runs(tensor, counts, self.rank + half, reach - half)
            arriving = self._runs(tensor, counts, self.rank, reach - half)
            target, source = (self.rank + half) % self.size, (self.rank - half) % self.size
            sent = [self._send(as_bytes(piece), target) for run in leaving for piece in _cut(run)]
            self._add_arriving([piece for run in arriving for piece in _cut(run)], source, op)
            self._finish(sent)
            reach = half

    def _add_arriving(self, pieces: Sequence[torch.Tensor], source: int, op: ReduceOp) -> None:
        """Combine what `source` sends with these pieces, while the next piece is travelling."""
        if not pieces:
            return
        longest = max(piece.numel() for piece in pieces)
        scratch = self._scratch_for(2 * longest * pieces[0].element_size()).view(pieces[0].dtype)
        buffers = [  # two that alternate
            scratch.view(2, longest)[number % 2, : piece.numel()]
            for number, piece in enumerate(pieces)
        ]
        under_way = [self._receive(as_bytes(buffers[0]), source)]
        for number, piece in enumerate(pieces):
            if number + 1 < len(pieces):
                under_way.append(self._receive(as_bytes(buffers[number + 1]), source))
            self._finish([under_way[number]])
            own = as_blocks(piece)
            reduce_into(own, [own, as_blocks(buffers[number])], op)

    def _gather_in_rounds(self, tensor: torch.Tensor, counts: Sequence[int]) -> None:
        """Fill in the slices of the other ranks in `tensor`; each rank has its own slice."""
        distance = 1
        while distance < self.size:
            count = min(distance, self.size - distance)
            target, source = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            pending = [
                self._receive(as_bytes(piece), source)
                for run in self._runs(tensor, counts, self.rank + distance, count)
                for piece in _cut(run)
            ]
            pending += [
                self._send(as_bytes(piece), target)
                for run in self._runs(tensor, counts, self.rank, count)
                for piece in _cut(run)
            ]
            self._finish(pending)
            distance *= 2

    def _runs(
        self, tensor: torch.Tensor, counts: Sequence[int], first: int, count: int
    ) -> list[torch.Tensor]:
        """Return the slices of `count` ranks from `first` on, as one piece of memory or two."""
        starts = [*offsets_of(counts), tensor.numel()]
        first %= self.size
        last = first + count
        runs = [tensor[starts[first] : starts[min(last, self.size)]]]
        if last > self.size:
            runs.append(tensor[: starts[last - self.size]])
        return [run for run in runs if run.numel()]

    def _tree(self, root: int) -> tuple[int | None, list[int]]:
        """Return our parent and our children in the binomial tree with the root `root`."""
        position = (self.rank - root) % self.size  # in the tree, whose root has position 0
        reach = position & -position if position else 1 << (self.size - 1).bit_length()
        parent = None if position == 0 else (position - reach + root) % self.size
        children = []
        while reach > 1:
            reach //= 2
            if position + reach < self.size:
                children.append((position + reach + root) % self.size)
        return parent, children

    def _send_long(self, tensor: torch.Tensor, rank: int) -> list[Any]:
        """Begin to send a tensor of any size."""
        return [self._send(piece, rank) for piece in _pieces(as_bytes(tensor), MESSAGE)]

    def _receive_long(self, tensor: torch.Tensor, rank: int) -> list[Any]:
        """Begin to receive a tensor of any size."""
        return [self._receive(piece, rank) for piece in _pieces(as_bytes(tensor), MESSAGE)]

    def _scratch_for(self, nbytes: int) -> torch.Tensor:
        """Return scratch memory, which the next call may return as well."""
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes]


def _cut(run: torch.Tensor) -> list[torch.Tensor]:
    """Cut a tensor into pieces, of which one is reduced while the next arrives."""
    most = max(1, ROUND_PIECE // run.element_size())
    return list(torch.split(run, most))


def _pieces(data: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield bytes in pieces of at most `nbytes`."""
    for start in range(0, data.numel(), nbytes):
        yield data[start : start + nbytes]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor, unless both are the same memory."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
