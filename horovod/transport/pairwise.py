"""Collectives composed of sends and receives between pairs of ranks.

For transports that move bytes between two ranks: TCP, and MPI where its own collectives lack data
types or counts. Data travels as bytes, so every data type works; the arithmetic is ours
(`arithmetic`). A slice is reduced by one rank, so results are bitwise the same everywhere.

- Few ranks, small tensors: everybody sends the whole tensor to everybody, one hop.
- Few ranks, large tensors: each collects and reduces its own slice, in the order of ranks, piece by
  piece while the next pieces are under way, then sends the result to everybody.
- Many ranks: the same in rounds with ranks at distances 1, 2, 4, ...: as many bytes, but messages
  grow with the logarithm of the number of ranks. Half precision is rounded once a round.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import as_blocks, quietly, reduce_into
from horovod.transport.base import Group
from horovod.transport.breakable import BreakableTransport

WHOLE = 32 * 1024  # bytes up to which an allreduce sends whole tensors
WHOLE_TOTAL = 1024 * 1024  # ... as long as all that arrives at one rank stays below this
PIECE = 4 * 1024 * 1024  # bytes of one message of a pipelined collective
ROUND_PIECE = 512 * 1024  # bytes of one message among many ranks
SCRATCH = 32 * 1024 * 1024  # bytes of arriving pieces kept at a time, over all peers
MESSAGE = 1 << 30  # bytes of the largest message; below every limit on 32-bit counts
DIRECT = 8  # ranks up to which everybody tells everybody directly


def split_evenly(count: int, parts: int) -> list[int]:
    """`count` as `parts` nearly equal summands, larger ones first."""
    share, rest = divmod(count, parts)
    return [share + (index < rest) for index in range(parts)]


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Where each of the consecutive slices begins."""
    return [0, *accumulate(counts)][:-1]


def cut(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """The consecutive slices of `tensor` with these many elements each."""
    starts = offsets_of(counts)
    return [tensor[s : s + count] for s, count in zip(starts, counts, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a flat, contiguous tensor.

    With one element or none it is contiguous whatever its stride, over which `view` stumbles.
    """
    if tensor.stride(0) != 1:
        tensor = tensor.as_strided(tensor.shape, (1,))
    return tensor.view(torch.uint8)


class PairwiseTransport(BreakableTransport):
    """All collectives, from `_send`, `_receive` and `_finish` of a subclass."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        # Everybody begins with another peer, so that no rank is hit by all at once.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._scratch = torch.empty(0, dtype=torch.uint8)

    # -- what a subclass provides ----------------------------------------------------------

    @abstractmethod
    def _send(self, data: torch.Tensor, rank: int) -> Any:
        """Begin to send these bytes (1 to MESSAGE of them); the tensor stays as it is meanwhile."""

    @abstractmethod
    def _receive(self, data: torch.Tensor, rank: int) -> Any:
        """Begin to receive exactly these many bytes; messages of one rank arrive in order."""

    @abstractmethod
    def _finish(self, pending: list[Any]) -> None:
        """Wait until all that was begun is done."""

    # -- collectives -----------------------------------------------------------------------

    @quietly
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

    @quietly
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
        """Down a binomial tree, in pieces, so that the levels of the tree work at the same time."""
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
        """Each round doubles the number of ranks of which a rank knows that they arrived."""
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
        """Every rank's tensor (all of one length, small), in rank order."""
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
        """Reduce everybody's slice that belongs to us into `output`, which may be that slice."""
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
                for place, peer in reversed(list(enumerate(self._peers))):
                    into = arrivals[index % 2, place, :count]
                    receiving.append(self._receive(as_bytes(into), peer))
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
                for place, peer in enumerate(self._peers):
                    operands[peer] = arrivals[index % 2, place, :count]
                reduce_into(output[span], operands, op)
            self._finish(sending)

    def _gather_slices(self, slices: Sequence[torch.Tensor]) -> None:
        """Give our slice to everybody and get theirs."""
        pending: list[Any] = []
        for peer in reversed(self._peers):
            pending.extend(self._receive_long(slices[peer], peer))
        for peer in self._peers:
            pending.extend(self._send_long(slices[self.rank], peer))
        self._finish(pending)

    def _reduce_by_rounds(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        counts = split_evenly(tensor.numel(), self.size)
        self._reduce_in_rounds(tensor, counts, op)
        self._gather_in_rounds(tensor, counts)

    def _reduce_in_rounds(self, tensor: torch.Tensor, counts: Sequence[int], op: ReduceOp) -> None:
        """Our slice of `tensor` becomes the reduction; others are left with partial results.

        A rank is responsible for the slices of the next `reach` ranks, its own among them. In every
        round it hands the farther half to the rank where they begin, and gets, from the rank as far
        behind it, more of what it keeps.
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
        """Combine what `source` sends with these pieces, while the next one is under way."""
        if not pieces:
            return
        longest = max(piece.numel() for piece in pieces)
        scratch = self._scratch_for(2 * longest * pieces[0].element_size()).view(pieces[0].dtype)
        places = [
            scratch.view(2, longest)[number % 2, : piece.numel()]
            for number, piece in enumerate(pieces)
        ]
        under_way = [self._receive(as_bytes(places[0]), source)]
        for number, piece in enumerate(pieces):
            if number + 1 < len(pieces):
                under_way.append(self._receive(as_bytes(places[number + 1]), source))
            self._finish([under_way[number]])
            own = as_blocks(piece)
            reduce_into(own, [own, as_blocks(places[number])], op)

    def _gather_in_rounds(self, tensor: torch.Tensor, counts: Sequence[int]) -> None:
        """Every rank has its own slice of `tensor`; fill in the others'."""
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
        """The slices of `count` ranks from `first` on, as one piece of memory or two."""
        starts = [*offsets_of(counts), tensor.numel()]
        first %= self.size
        last = first + count
        runs = [tensor[starts[first] : starts[min(last, self.size)]]]
        if last > self.size:
            runs.append(tensor[: starts[last - self.size]])
        return [run for run in runs if run.numel()]

    def _tree(self, root: int) -> tuple[int | None, list[int]]:
        """Our parent and children in the binomial tree that `root` is the root of."""
        place = (self.rank - root) % self.size
        reach = place & -place if place else 1 << (self.size - 1).bit_length()
        parent = None if place == 0 else (place - reach + root) % self.size
        children = []
        while reach > 1:
            reach //= 2
            if place + reach < self.size:
                children.append((place + reach + root) % self.size)
        return parent, children

    def _send_long(self, tensor: torch.Tensor, rank: int) -> list[Any]:
        return [self._send(piece, rank) for piece in _pieces(as_bytes(tensor), MESSAGE)]

    def _receive_long(self, tensor: torch.Tensor, rank: int) -> list[Any]:
        return [self._receive(piece, rank) for piece in _pieces(as_bytes(tensor), MESSAGE)]

    def _scratch_for(self, nbytes: int) -> torch.Tensor:
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes]


def _cut(run: torch.Tensor) -> list[torch.Tensor]:
    """In pieces of which one is reduced while the next arrives."""
    most = max(1, ROUND_PIECE // run.element_size())
    return [run[start : start + most] for start in range(0, run.numel(), most)]


def _pieces(data: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    for start in range(0, data.numel(), nbytes):
        yield data[start : start + nbytes]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
