"""The seam between the engine and whatever moves the bytes.

A transport connects the ranks of one group (the world, or one process set). Every method except
`abort` is collective: all ranks call the same methods in the same order, from one thread at a
time. Tensors are flat (one dimension) and contiguous. Ranks are ranks in the group.
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
from horovod.common.reduce_op import ReduceOp
from horovod.common.store import Store

WORD = 8  # bytes of one word of `agree`
MAX_WORDS = 512  # the most words one call of `agree` takes
MAX_TENSORS = 1024  # the most tensors one call of `allreduce_vector` takes

SHARED_MEMORY, NETWORK, DEVICE = "shared_memory", "network", "device"  # what carries bytes


@dataclass(frozen=True)
class Group:
    """What a transport is built from: who we are in the group and where to meet the others."""

    rank: int
    size: int
    global_ranks: tuple[int, ...]  # group rank -> world rank, for messages to people
    store: Store  # already prefixed: no other group or generation uses these keys
    config: Config

    def describe(self, rank: int) -> str:
        return f"rank {self.global_ranks[rank]}"

    def check_meeting(self) -> None:
        """Raise if the store knows that the ranks will not all come, as an elastic job's may.

        For transports that wait for their peers by other means than the store while they connect.
        """
        with contextlib.suppress(TimeoutError):
            self.store.get("nobody sets this", 0.0)


class Transport(ABC):
    """Collectives among the ranks of one group.

    Failures raise `HorovodInternalError` (`PeerLostError` when a rank is gone, naming it). After
    a failure the transport is broken for good: every later call raises too, and only `close` is
    left to do.
    """

    vectored: bool = False  # whether `allreduce_vector` takes more than one tensor
    sends_ahead: bool = False  # whether `begin_allreduce` does more than to take note
    crosses_hosts: bool = False  # whether a collective waits for a network more than it computes
    algorithms: tuple[str, ...] = ()  # ways to reduce, if `use` has a choice; the default first
    media: tuple[str, ...] = (NETWORK,)  # what a tensor passes on its way, for statistics
    name: ClassVar[str]  # for people, and the timeline's phases: "SHM", "GLOO", "NCCL", "MPI", ...

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self._begun: Callable[[], None] | None = None

    # -- agreement -------------------------------------------------------------------------

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        """How many leading 8-byte words are the same on all ranks.

        At most MAX_WORDS words; ranks may bring different numbers of them. `preload` is the very
        list that the caller will hand to the next `allreduce_vector` in case *all* words agree
        on all ranks (and all brought equally many): a transport may send the content along.
        Passing it is a hint, and never an obligation to make that call.
        """
        return agree_by_minimum(self, words)

    # -- data ------------------------------------------------------------------------------

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduce `tensor` over all ranks, in place. SUM, MIN, MAX or PRODUCT.

        Bitwise the same result on every rank. fp16 and bf16 accumulate in fp32 where the
        transport does the arithmetic itself. bool: SUM and MAX are "or", PRODUCT and MIN "and".
        """

    def allreduce_vector(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        """Reduce several contiguous tensors of one dtype as if one, and multiply the result.

        A transport that is not `vectored` takes a single, flat tensor. `scale` other than 1 is for
        floating and complex types; the product is rounded as if it were taken afterwards. What
        crosses hosts may travel as `wire`, a narrower type; the result is then rounded to it.
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
        """Like `allreduce_vector`, but only as far as it goes without waiting.

        `finish_allreduce` must be the next call; the caller may do other things in between.
        """
        self._begun = partial(self.allreduce_vector, tensors, op, scale, wire)

    def finish_allreduce(self) -> None:
        """Complete what `begin_allreduce` began."""
        assert self._begun is not None
        begun, self._begun = self._begun, None
        begun()

    def use(self, algorithm: str) -> None:
        """Reduce in this way, one of `algorithms`, from now on. Collective."""
        raise ValueError(f"{self.name} has no choice of algorithms")

    @abstractmethod
    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        """Reduce `source`, made of `size` slices of `counts` elements; `output` gets ours.

        `source` may be overwritten.
        """

    @abstractmethod
    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        """Concatenate every rank's `source` of `counts[rank]` elements into `output`."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's `tensor` into everybody's, in place."""

    @abstractmethod
    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """Send slice i of `source` to rank i; `output` is what the ranks sent us, in rank order."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    # -- life ------------------------------------------------------------------------------

    def check_usable(self) -> None:  # noqa: B027 (some cannot break between two calls)
        """Raise if the transport is broken."""

    def check_peers(self) -> None:  # noqa: B027 (some notice it by themselves, or never)
        """Raise if a rank is known to be gone, or the transport is broken.

        Not collective, and returns at once: any thread may call it, also during a collective.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make this and all later calls fail, here and on the other ranks. Any thread may call.

        Returns at once; a call blocked in another thread raises soon after.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Not collective; safe to call twice and after a failure."""

    def after_fork_in_child(self) -> None:  # noqa: B027 (most transports hold nothing)
        """Drop descriptors that a forked child inherited; it never uses the transport."""


def agree_by_minimum(transport: Transport, words: bytes) -> int:
    """`Transport.agree` by one MIN-allreduce of every word and its complement.

    A word is common where min(w) == ~min(~w), i.e. minimum and maximum coincide. Cost grows with
    the logarithm of the number of ranks, unlike gathering all headers at one of them.
    """
    count = len(words) // WORD
    probe = torch.zeros(2 * (MAX_WORDS + 1), dtype=torch.int64)
    mine = probe[: MAX_WORDS + 1]
    mine[0] = count
    if count:
        mine[1 : 1 + count] = torch.frombuffer(bytearray(words), dtype=torch.int64)
    torch.bitwise_not(mine, out=probe[MAX_WORDS + 1 :])
    transport.allreduce(probe, ReduceOp.MIN)
    lowest, highest = probe[: MAX_WORDS + 1], ~probe[MAX_WORDS + 1 :]
    common = int(lowest[0])  # the fewest words any rank brought
    different = (lowest[1 : 1 + common] != highest[1 : 1 + common]).nonzero()
    return int(different[0]) if len(different) else common
