"""Collectives composed of sends and receives between pairs of ranks.

For transports whose engine moves bytes between two ranks well but lacks data types, ragged counts
or fixed summation order in its own collectives: Gloo, and MPI where its counts do not suffice.
Data travels as bytes, so every data type works; the arithmetic is ours (`arithmetic`), in rank
order, so results are bitwise the same everywhere.

- Small tensors: everybody sends the whole tensor to everybody, one hop.
- Large ones: each rank collects and reduces its own slice, piece by piece while the next pieces
  are under way, then sends the result to everybody. That moves no more bytes than a ring does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import reduce_into
from horovod.transport.base import WORD, Group, Transport

WHOLE = 32 * 1024  # bytes up to which an allreduce sends whole tensors
WHOLE_TOTAL = 1024 * 1024  # ... as long as all that arrives at one rank stays below this
PIECE = 4 * 1024 * 1024  # bytes of one message of a pipelined collective
SCRATCH = 32 * 1024 * 1024  # bytes of arriving pieces kept at a time, over all peers
MESSAGE = 1 << 30  # bytes of the largest message; below every limit on 32-bit counts
DIRECT = 8  # ranks up to which everybody tells everybody directly
HEAD = 31  # words that the first exchange of `agree` carries


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
    return tensor.view(torch.uint8)


class PairwiseTransport(Transport):
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

    @abstractmethod
    def _guard(self) -> AbstractContextManager[None]:
        """Around every collective: refuses when broken, and turns failures into our errors."""

    # -- collectives -----------------------------------------------------------------------

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        """Compares the first words in one small exchange; only longer agreement needs more."""
        count = len(words) // WORD
        head = torch.zeros(1 + HEAD, dtype=torch.int64)
        head[0] = count
        shown = min(count, HEAD)
        if shown:
            head[1 : 1 + shown] = torch.frombuffer(
                bytearray(words[: shown * WORD]), dtype=torch.int64
            )
        with self._guard():
            lowest, highest = self._extremes(head)
        fewest = int(lowest[0])
        compared = slice(1, 1 + min(fewest, HEAD))
        different = (lowest[compared] != highest[compared]).nonzero()
        if len(different):
            return int(different[0])
        if fewest <= HEAD:
            return fewest
        return super().agree(words)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        with self._guard():
            if not tensor.numel() or self.size == 1:
                return
            if tensor.nbytes <= WHOLE and tensor.nbytes * self.size <= WHOLE_TOTAL:
                reduce_into(tensor, self._exchange(tensor), op)
                return
            counts = split_evenly(tensor.numel(), self.size)
            slices = cut(tensor, counts)
            self._reduce_slices(slices, slices[self.rank], op)
            self._gather_slices(slices)

    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        with self._guard():
            self._reduce_slices(cut(source, counts), output, op)

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        with self._guard():
            slices = cut(output, counts)
            _copy(source, slices[self.rank])
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

    def _extremes(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest of every rank's integers, element by element.

        Few ranks tell each other directly. Many pass on what they have seen to ranks at distance
        1, 2, 4, ...: after a logarithmic number of hops everybody has heard of everybody.
        """
        if self.size <= DIRECT:
            everyone = torch.stack(self._exchange(tensor))
            return everyone.amin(dim=0), everyone.amax(dim=0)
        seen = torch.cat([tensor, ~tensor])  # the complement's least is the greatest's complement
        arrived = torch.empty_like(seen)
        distance = 1
        while distance < self.size:
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            receiving = self._receive(as_bytes(arrived), source)
            self._finish([receiving, self._send(as_bytes(seen), target)])
            torch.minimum(seen, arrived, out=seen)
            distance *= 2
        return seen[: len(tensor)], ~seen[len(tensor) :]

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


def _pieces(data: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    for start in range(0, data.numel(), nbytes):
        yield data[start : start + nbytes]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
