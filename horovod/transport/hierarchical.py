"""Collectives of several hosts: one transport inside each host, another between hosts.

The data of a collective is cut into *lanes*. Lane i is carried by the rank with local index i on
every host: it gathers or reduces its part inside the host, exchanges it with the carriers of the
same lane on the other hosts, and shares the result inside the host. With as many lanes as the
smallest host has ranks, all of them keep the network busy, and each byte crosses it once per host,
not once per rank. Small tensors use one lane: fewer messages. Ranks beyond the lanes (hosts of
different sizes) carry nothing. Called by the transport selection.

An alltoall has no such shortcut between hosts: there its data goes straight from rank to rank, over
the flat transport, which also does the collectives that HOROVOD_HIERARCHICAL_ALLREDUCE=0 and
HOROVOD_HIERARCHICAL_ALLGATHER=0 switch off here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import ParamSpec, TypeVar, cast

import torch

from horovod.common.exceptions import HorovodInternalError, fresh_copy
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import NETWORK, SHARED_MEMORY, WORD, Group, Transport
from horovod.transport.breakable import BreakableTransport
from horovod.transport.division import as_bytes, cut, overlaps, split_evenly
from horovod.transport.host.peer_reduction import OtherHosts
from horovod.transport.host.shared_memory import SharedMemoryTransport

P = ParamSpec("P")
T = TypeVar("T")

ONE_LANE = 64 * 1024  # bytes up to which one lane is used
IN_PLACE = 256 * 1024  # bytes from which ranks of a host reduce where their tensors are
PIECE = 4 * 1024 * 1024  # bytes that are reduced inside a host while others are between hosts


class HierarchicalTransport(BreakableTransport):
    """A transport made of three others, which it owns: it closes and aborts them.

    Args:
        group: The ranks.
        local: The transport among the ranks of this host.
        cross: The transport among the ranks of our local index on all hosts, in the order of
            `hosts`; None exactly where some host has no rank of that index.
        hosts: The group's ranks, host by host. The position of a rank in its host's list is its
            local index, and its rank in `local`.
        flat: The transport among all ranks.
    """

    name = "HIERARCHICAL"
    media = (SHARED_MEMORY, NETWORK)
    crosses_hosts = True

    def __init__(
        self,
        group: Group,
        local: Transport,
        cross: Transport | None,
        hosts: Sequence[Sequence[int]],
        flat: Transport,
    ) -> None:
        super().__init__(group)
        self.local = local
        self.cross = cross
        self.flat = flat
        self.hosts = [tuple(ranks) for ranks in hosts]
        self._host = next(i for i, ranks in enumerate(self.hosts) if self.rank in ranks)
        self._neighbours = self.hosts[self._host]
        self._index = self._neighbours.index(self.rank)
        self._most_lanes = min(len(ranks) for ranks in self.hosts)
        self._by_flat = group.config.hierarchical_allreduce is False
        self.algorithms = ("flat", "hierarchical") if self._by_flat else ("hierarchical", "flat")
        self._parts = [part for part in (local, cross, flat) if part is not None]
        for part in self._parts:
            self._listen_to(part)
        # Tensors are reduced in place where the ranks of every host read each other's memory, and
        # all hosts have equally many ranks.
        self._in_place: SharedMemoryTransport | None = None
        can = isinstance(local, SharedMemoryTransport) and local.peer_memory
        can = can and len({len(ranks) for ranks in self.hosts}) == 1
        all_can = torch.tensor([can and cross is not None and cross.vectored])
        self._do(flat.allreduce, all_can, ReduceOp.MIN)
        if bool(all_can) and isinstance(local, SharedMemoryTransport):
            self._in_place = local
            self.vectored = True

    # -- collectives -----------------------------------------------------------------------

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        """Agree inside each host; then one rank of each compares the result with other hosts."""
        with self._guard():
            if self._by_flat:
                return self._do(self.flat.agree, words)
            common = self._do(self.local.agree, words)
            if self._index == 0 and self.cross is not None:
                common = self._do(self.cross.agree, words[: common * WORD])
            verdict = torch.tensor([common])
            self._do(self.local.broadcast, verdict, 0)
            return int(verdict)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        self.allreduce_vector([tensor], op)

    def allreduce_vector(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        with self._guard():
            nbytes = sum([tensor.nbytes for tensor in tensors])
            if self._in_place is not None and nbytes > IN_PLACE and not self._by_flat:
                assert self.cross is not None
                others = OtherHosts(self.cross, (op, scale, wire), self._without_ranks)
                self._do(self._in_place.allreduce_around, tensors, op, others)
                return
            is_single = len(tensors) == 1
            tensor = tensors[0] if is_single else torch.cat([each.view(-1) for each in tensors])
            if self._by_flat:
                self._do(self.flat.allreduce_vector, [tensor], op, scale, wire)
            elif nbytes:
                self._reduce_in_pieces(tensor, op, wire)
                if scale != 1.0:
                    tensor.mul_(scale)
            if not is_single:
                parts = cut(tensor, [each.numel() for each in tensors])
                for target, part in zip(tensors, parts, strict=True):
                    target.view(-1).copy_(part)

    def _reduce_in_pieces(
        self, tensor: torch.Tensor, op: ReduceOp, wire: torch.dtype | None
    ) -> None:
        """Reduce inside hosts, between them, and share the result.

        While a piece is on the network the ranks of a host reduce the next one, and share the
        result of the one before.
        """
        most = max(1, PIECE // tensor.element_size())
        pieces = [tensor[start : start + most] for start in range(0, tensor.numel(), most)]
        previous: tuple[torch.Tensor, torch.Tensor, list[int]] | None = None
        for piece in pieces:
            counts = self._lane_counts(piece.numel(), self._lanes(tensor.nbytes))
            mine = piece.new_empty(counts[self._index])
            self._do(self.local.reduce_scatter, piece, mine, counts, op)
            if previous is not None:
                self._finish_cross(previous[0])
            if self.cross is not None and mine.numel():
                self._do(self.cross.begin_allreduce, [mine], op, 1.0, wire)
            if previous is not None:
                self._do(self.local.allgather, *previous)
            previous = mine, piece, counts
        assert previous is not None
        self._finish_cross(previous[0])
        self._do(self.local.allgather, *previous)

    def _finish_cross(self, mine: torch.Tensor) -> None:
        """Wait for the reduction between hosts of our lane, if there is one."""
        if self.cross is not None and mine.numel():
            self._do(self.cross.finish_allreduce)

    def use(self, algorithm: str) -> None:
        self._by_flat = algorithm == "flat"

    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        """Reduce inside hosts, between them, and deliver each rank's slice.

        Each lane carries a portion of every host's block. The carriers of a host end with the
        portions of their own host's block.
        """
        with self._guard():
            if self._by_flat:
                self._do(self.flat.reduce_scatter, source, output, counts, op)
                return
            lanes = self._lanes(source.nbytes)
            blocks = self._block_counts(counts)
            portions = [split_evenly(block, lanes) for block in blocks]  # [host][lane]
            pieces = self._by_host(source, counts, portions)
            per_lane = [sum(portion[lane] for portion in portions) for lane in range(lanes)]
            mine = source.new_empty(per_lane[self._index] if self._index < lanes else 0)
            arranged = torch.cat([host[lane] for lane in range(lanes) for host in pieces])
            self._do(self.local.reduce_scatter, arranged, mine, self._padded(per_lane), op)
            share = [portion[self._index] if self._index < lanes else 0 for portion in portions]
            reduced = source.new_empty(share[self._host])
            if self.cross is not None and mine.numel():
                self._do(self.cross.reduce_scatter, mine, reduced, share, op)
            # The carriers of our host now have its block, one portion each; deliver it.
            owners = [counts[rank] for rank in self._neighbours]
            carriers = self._padded(portions[self._host])
            self._do(
                self.local.alltoall,
                reduced,
                output,
                overlaps(carriers, owners)[self._index],
                [row[self._index] for row in overlaps(carriers, owners)],
            )

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        with self._guard():
            if self.group.config.hierarchical_allgather is False:
                self._do(self.flat.allgather, source, output, counts)
                return
            lanes = self._lanes(output.nbytes)
            blocks = self._block_counts(counts)
            portions = [split_evenly(block, lanes) for block in blocks]
            ours = source.new_empty(blocks[self._host])
            self._do(
                self.local.allgather, source, ours, [counts[rank] for rank in self._neighbours]
            )
            per_lane = [sum(portion[lane] for portion in portions) for lane in range(lanes)]
            mine = source.new_empty(per_lane[self._index] if self._index < lanes else 0)
            if self.cross is not None and mine.numel():
                portion = cut(ours, portions[self._host])[self._index]
                self._do(self.cross.allgather, portion, mine, [p[self._index] for p in portions])
            arranged = source.new_empty(sum(per_lane))
            self._do(self.local.allgather, mine, arranged, self._padded(per_lane))
            by_lane = [
                cut(lane, [portion[index] for portion in portions])
                for index, lane in enumerate(cut(arranged, per_lane))
            ]
            targets = cut(output, counts)
            for host, ranks in enumerate(self.hosts):
                block = torch.cat([lane[host] for lane in by_lane])
                for rank, part in zip(
                    ranks, cut(block, [counts[rank] for rank in ranks]), strict=True
                ):
                    targets[rank].copy_(part)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self._guard():
            if not tensor.numel():
                return
            data = as_bytes(tensor)
            origin = next(i for i, ranks in enumerate(self.hosts) if root in ranks)
            if self._host == origin:
                self._do(self.local.broadcast, data, self._neighbours.index(root))
            counts = self._lane_counts(data.numel(), self._lanes(data.numel()))
            lane = cut(data, counts)[self._index]
            if self.cross is not None and lane.numel():
                self._do(self.cross.broadcast, lane, origin)
            if self._host != origin:
                self._do(self.local.allgather, lane.clone(), data, counts)

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """Exchange slices inside the host by `local`, the rest straight from rank to rank."""
        with self._guard():
            leaving = cut(source, send_counts)
            arriving = cut(output, receive_counts)
            near = list(self._neighbours)
            far_ranks = set(range(self.size)) - set(self._neighbours)
            sent = torch.cat([leaving[rank] for rank in near])
            got = output.new_empty(sum(receive_counts[rank] for rank in near))
            received = [receive_counts[rank] for rank in near]
            self._do(self.local.alltoall, sent, got, [send_counts[rank] for rank in near], received)
            for rank, part in zip(near, cut(got, received), strict=True):
                arriving[rank].copy_(part)
            outward = [count if r in far_ranks else 0 for r, count in enumerate(send_counts)]
            inward = [count if r in far_ranks else 0 for r, count in enumerate(receive_counts)]
            sent = torch.cat([source[:0], *(leaving[rank] for rank in sorted(far_ranks))])
            got = output.new_empty(sum(inward))
            self._do(self.flat.alltoall, sent, got, outward, inward)
            for rank, part in enumerate(cut(got, inward)):
                if rank in far_ranks:
                    arriving[rank].copy_(part)

    def barrier(self) -> None:
        with self._guard():
            self._do(self.local.barrier)
            if self._index == 0 and self.cross is not None:
                self._do(self.cross.barrier)
            self._do(self.local.barrier)

    # -- layout ----------------------------------------------------------------------------

    def _lanes(self, nbytes: int) -> int:
        """Return the number of lanes for a collective of this size."""
        return 1 if nbytes <= ONE_LANE else self._most_lanes

    def _padded(self, per_lane: Sequence[int]) -> list[int]:
        """Return counts for the ranks of this host: 0 for those beyond the lanes."""
        return [*per_lane, *[0] * (len(self._neighbours) - len(per_lane))]

    def _lane_counts(self, count: int, lanes: int) -> list[int]:
        """Return how many of `count` elements each rank of this host carries."""
        return self._padded(split_evenly(count, lanes))

    def _block_counts(self, counts: Sequence[int]) -> list[int]:
        """Return how many elements belong to the ranks of each host together."""
        return [sum(counts[rank] for rank in ranks) for ranks in self.hosts]

    def _by_host(
        self, source: torch.Tensor, counts: Sequence[int], portions: Sequence[Sequence[int]]
    ) -> list[list[torch.Tensor]]:
        """Cut `source`, which is in rank order, into portions [host][lane]."""
        slices = cut(source, counts)
        return [
            cut(torch.cat([slices[rank] for rank in ranks]), portion)
            for ranks, portion in zip(self.hosts, portions, strict=True)
        ]

    # -- failure and the end ---------------------------------------------------------------

    def _explain(self, error: BaseException) -> HorovodInternalError:
        """Return the error for all ranks: what a rank posted, if there is such a reason.

        A rank that posts knows the cause. The three transports only see that somebody has left.
        """
        return self._board.look() or super()._explain(error)

    def _do(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of one of the three transports; its errors then name our group's ranks."""
        try:
            return method(*args, **kwargs)
        except HorovodInternalError as error:
            part = cast(Transport, cast(MethodType, method).__self__)
            raise self._translated(part, error) from error

    def _without_ranks(self, error: HorovodInternalError) -> HorovodInternalError:
        """Return an error between hosts for the transport inside this one.

        The ranks that it names mean others there. All ranks find the error with ranks on the board,
        so it must be there first.
        """
        assert self.cross is not None
        failure = self._break(self._explain(self._translated(self.cross, error)))
        self._announce(failure)  # another thread may have broken it, and not announced it yet
        return HorovodInternalError(str(failure))

    def _translated(self, part: Transport, error: HorovodInternalError) -> HorovodInternalError:
        """Return an error of one of the three transports with the ranks of our group."""
        if not error.ranks:
            return error
        translated = fresh_copy(error)
        translated.ranks = self.group.ranks_of(part.group, error.ranks)
        return translated

    def _listen_to(self, part: Transport) -> None:
        """Break as soon as `part` breaks, even while this rank waits in another of the three."""
        if isinstance(part, BreakableTransport):
            part.on_failure = lambda failure: self._break(
                self._explain(self._translated(part, failure))
            )

    def check_peers(self) -> None:
        super().check_peers()
        if not self._closed:
            self._do(self.local.check_peers)

    def find_awaited(self) -> list[int] | None:
        found: set[int] = set()
        for part in self._parts:
            awaited = part.find_awaited()
            if awaited is None:
                return None
            found.update(self.group.ranks_of(part.group, awaited))
        return sorted(found)

    def _wake(self, failure: HorovodInternalError) -> None:
        for part in self._parts:
            part.abort(str(failure))

    def close(self) -> None:
        if self._closed:
            return
        self._shut()
        for part in self._parts:
            part.close()
            if isinstance(part, BreakableTransport):
                # The callback makes a cycle of references, which would keep the shared memory
                # until Python's collector runs.
                part.on_failure = None

    def after_fork_in_child(self) -> None:
        for part in self._parts:
            part.after_fork_in_child()
