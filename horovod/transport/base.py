"""The interface between the engine and the transports, which move the bytes.

A transport connects the ranks of one group (the world, or one process set). Unless it says
otherwise a method is collective: all ranks call the same methods in the same order, from one
thread at a time. Tensors are flat (one dimension) and contiguous. Ranks are ranks in the group.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from horovod.common.config import Config
from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.common.store import Store

WORD = 8  # bytes of one word of `agree`
MAX_WORDS = 512  # words that one call of `agree` takes at most
MAX_TENSORS = 1024  # tensors that one call of `allreduce_vector` takes at most

SHARED_MEMORY, NETWORK, DEVICE = "shared_memory", "network", "device"  # the media of transports


@dataclass(frozen=True)
class Group:
    """What a transport is built from: our rank in the group, and the store to find the others."""

    rank: int
    size: int
    global_ranks: tuple[int, ...]  # group rank -> world rank, for messages to people
    store: Store  # already prefixed: no other group or generation uses these keys
    config: Config

    def describe(self, rank: int) -> str:
        """Return the name of a rank for messages to people."""
        return f"rank {self.global_ranks[rank]}"

    def ranks_of(self, part: Group, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers that ranks of `part`, whose members are in this group, have here."""
        return tuple(self.global_ranks.index(part.global_ranks[rank]) for rank in ranks)

    def check_rendezvous(self) -> None:
        """Raise if the store knows that some ranks will not come, as the store of an elastic job.

        Transports call it while they connect and wait for their peers without using the store.
        """
        with contextlib.suppress(TimeoutError):
            # The store of an elastic generation raises another error once somebody has given up.
            self.store.get("nobody sets this", 0.0)


class Transport(ABC):
    """Collectives among the ranks of one group.

    A method that fails raises `HorovodInternalError`, or `PeerLostError`, which names the ranks
    that are gone. After a failure the transport is broken for good: every later call raises too,
    and the caller can only `close` it.
    """

    vectored: bool = False  # whether `allreduce_vector` takes more than one tensor
    sends_ahead: bool = False  # whether `begin_allreduce` already sends something
    crosses_hosts: bool = False  # whether a collective waits for a network more than it computes
    algorithms: tuple[str, ...] = ()  # the choices of `use`, the default first
    media: tuple[str, ...] = (NETWORK,)  # what a tensor passes through, for statistics
    name: ClassVar[str]  # in messages and in the timeline's phases: "SHM", "TCP", "NCCL", ...

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self._begun_allreduce: Callable[[], None] | None = None

    # -- agreement -------------------------------------------------------------------------

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        """Return how many leading 8-byte words are the same on all ranks.

        Args:
            words: At most MAX_WORDS words. Ranks may pass different numbers of them.
            preload: The list object that the caller will pass to the next `allreduce_vector` if
                *all* words agree on all ranks and all ranks passed equally many. The transport may
                send the tensors along with the words. The caller need not make that call.
        """
        # One MIN-allreduce of every word and its complement: a word is the same on all ranks where
        # min(w) == ~min(~w), i.e. where minimum and maximum coincide. The cost grows with the
        # logarithm of the number of ranks, whereas gathering all words at one rank grows with
        # their number.
        count = len(words) // WORD
        probe = torch.zeros(2 * (MAX_WORDS + 1), dtype=torch.int64)
        mine = probe[: MAX_WORDS + 1]
        mine[0] = count
        if count:
            mine[1 : 1 + count] = torch.frombuffer(bytearray(words), dtype=torch.int64)
        torch.bitwise_not(mine, out=probe[MAX_WORDS + 1 :])
        self.allreduce(probe, ReduceOp.MIN)
        lowest, highest = probe[: MAX_WORDS + 1], ~probe[MAX_WORDS + 1 :]
        common = int(lowest[0])  # the fewest words that any rank passed
        different = (lowest[1 : 1 + common] != highest[1 : 1 + common]).nonzero()
        return int(different[0]) if len(different) else common

    # -- data ------------------------------------------------------------------------------

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduce `tensor` over all ranks, in place. `op` is SUM, MIN, MAX or PRODUCT.

        The result is bitwise the same on every rank. fp16 and bf16 accumulate in fp32 where the
        transport does the arithmetic itself. For bool, SUM and MAX mean "or", PRODUCT and MIN
        mean "and".
        """

    def allreduce_vector(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        """Reduce several tensors as if they were one, in place, and multiply the result.

        Args:
            tensors: Contiguous tensors of one dtype. A transport that is not `vectored` takes a
                single, flat tensor.
            op: SUM, MIN, MAX or PRODUCT.
            scale: The factor for the result; other than 1 for floating and complex types only.
                The product is rounded as if it were taken after the reduction.
            wire: A narrower type in which the tensors may cross hosts. The result is then rounded
                to that type.
        """
        (tensor,) = tensors
        self.allreduce(tensor, op)
        if scale != 1.0:
            tensor.mul_(scale)

    def begin_allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        """Begin an `allreduce_vector`, as far as that is possible without waiting.

        `finish_allreduce` must be the next call of this transport.
        """
        self._begun_allreduce = partial(self.allreduce_vector, tensors, op, scale, wire)

    def finish_allreduce(self) -> None:
        """Complete what `begin_allreduce` began."""
        assert self._begun_allreduce is not None
        allreduce, self._begun_allreduce = self._begun_allreduce, None
        allreduce()

    def use(self, algorithm: str) -> None:
        """Reduce by `algorithm`, one of `algorithms`, from now on."""
        raise ValueError(f"{self.name} has no choice of algorithms")

    @abstractmethod
    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        """Reduce `source` over all ranks, and put this rank's slice of the result into `output`.

        Slice i of `source` has `counts[i]` elements. `source` may be overwritten.
        """

    @abstractmethod
    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        """Concatenate every rank's `source` of `counts[rank]` elements into `output`."""

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order. They may differ in length."""
        lengths = torch.empty(self.size, dtype=torch.int64)
        self.allgather(torch.tensor([len(content)]), lengths, [1] * self.size)
        counts: list[int] = lengths.tolist()
        source = torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8)[: len(content)]
        output = torch.empty(sum(counts), dtype=torch.uint8)
        self.allgather(source, output, counts)
        return [part.numpy().tobytes() for part in torch.split(output, counts)]

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the `tensor` of rank `root` into the `tensor` of every other rank."""

    @abstractmethod
    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """Send slice i of `source` to rank i, and put what rank i sends into slice i of `output`.

        Slice i of `source` has `send_counts[i]` elements, slice i of `output`
        `receive_counts[i]`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    # -- life ------------------------------------------------------------------------------

    def check_usable(self) -> None:  # noqa: B027 (some cannot break between two calls)
        """Raise if the transport is broken. Not collective."""

    def check_peers(self) -> None:  # noqa: B027 (some notice it by themselves, or never)
        """Raise if a rank is known to be gone, or the transport is broken.

        Not collective; returns at once. Any thread may call it, even during a collective.
        """

    def find_awaited(self) -> list[int] | None:
        """Return the ranks without which a collective in progress cannot go on; None if unknown.

        Not collective; returns at once. Any thread may call it, even during a collective.
        """
        return None

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make the running and all later calls fail, here and on the other ranks.

        Not collective; any thread may call it. It returns at once, and a call that blocks in
        another thread raises soon after.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Not collective; safe to call twice and after a failure."""

    def after_fork_in_child(self) -> None:  # noqa: B027 (most transports hold nothing)
        """Close descriptors that a forked child inherited. The child never uses the transport."""


class SingleTransport(Transport):
    """The transport of a group of one rank, which sends nothing, for tensors on any device."""

    name = "SINGLE"
    media = ()

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._reason: str | None = None

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        self._check()
        return len(words) // WORD

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        self._check()

    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        self._check()
        output.copy_(source)

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        self._check()
        output.copy_(source)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._check()

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        self._check()
        output.copy_(source)

    def barrier(self) -> None:
        self._check()

    def find_awaited(self) -> list[int]:
        return []

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason

    def close(self) -> None:
        self._reason = self._reason or "Horovod has been shut down"

    def _check(self) -> None:
        if self._reason is not None:
            raise HorovodInternalError(self._reason)


def count_common_words(queues: Sequence[bytes]) -> int:
    """Return how many leading words are the same in all queues."""
    first, fewest = queues[0], min(len(queue) for queue in queues) // WORD
    for number in range(fewest):
        at = slice(number * WORD, (number + 1) * WORD)
        if any(queue[at] != first[at] for queue in queues):
            return number
    return fewest
