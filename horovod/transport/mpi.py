"""Collectives over MPI, through mpi4py. For `--mpi`, `mpirun` and fabrics that only MPI speaks.

MPI's own collectives are used where they do the whole job: counts below 2^31, types and operators
whose result MPI defines the same way on every rank. The rest goes through the sends and receives
of `pairwise`: half precision, which MPI does not know; 8- and 16-bit integers, whose sums Open
MPI's vector code saturates; minimum and maximum of floating-point numbers, where NaN depends on the
order of operands; very large tensors.

A blocking MPI call cannot be interrupted, and burns a core while it waits. So each collective
begins with a non-blocking barrier, polled ever more slowly while the others are busy elsewhere:
there a rank can be woken by `abort`, its own or another's (seen in the group's store), and notices
ranks of its host that died. Only what then runs at once is left to MPI. (`mpirun` itself usually
ends the whole job when a rank dies.) A rank that was woken leaves its barrier unfinished; MPI
cannot take it back, so nothing but ending the process is left to do with that communicator.

A rank that closes tells the others in how many collectives it has taken part: who waits for it in a
later one knows that it will not come. It is told so in turn, and then ends without finalising MPI,
which would wait for all ranks: mpirun gets to see its exit code, and names it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
from mpi4py import MPI

from horovod.common import mpi
from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import Group, agree_by_minimum
from horovod.transport.endpoints import RankLocation
from horovod.transport.pairwise import MESSAGE, PairwiseTransport, as_bytes, offsets_of

_TAG = 1
_LEFT = 2  # tag of a message to all: the sender has closed, after this many collectives
_LOST = 3  # tag of a message to all: the sender has failed because of others
_SPIN_SECONDS = 200e-6  # polled without a break for this long: the usual wait is shorter
_LONGEST_NAP = 0.002
_LOOK_SECONDS = 0.5  # how often a long wait looks whether the others are well

_TYPES = {
    torch.bool: MPI.C_BOOL,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
}
_OPERATORS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}
_LOGICAL = {
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.PRODUCT: MPI.LAND,
}


def communicator_of(group: Group) -> MPI.Intracomm:
    """A communicator of the group's ranks, in their order. Collective among them, nobody else."""
    world = MPI.COMM_WORLD.Get_group()
    members = world.Incl(list(group.global_ranks))
    try:
        return MPI.COMM_WORLD.Create_group(members, tag=_TAG)
    finally:
        members.Free()
        world.Free()


class MpiTransport(PairwiseTransport):
    """The transport of ranks in one MPI job. `comm` has exactly the group's ranks, in order.

    The communicator is handed over: nobody else uses it, and `close` frees it; that of all ranks
    is kept until they have all closed.
    """

    name = "MPI"
    _kept: Any = None  # the communicator of all ranks that was closed last

    def __init__(self, group: Group, comm: MPI.Intracomm) -> None:
        super().__init__(group)
        if (comm.Get_rank(), comm.Get_size()) != (group.rank, group.size):
            raise ValueError(
                f"the communicator has rank {comm.Get_rank()} of {comm.Get_size()}, the group "
                f"rank {group.rank} of {group.size}"
            )
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ValueError(
                "MPI was initialised without support for calls from more than one thread; "
                "initialise it with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE"
            )
        self._comm: Any = comm
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        here = RankLocation.here()
        places = self._comm.allgather((here.pids, here.pid))
        self._pids = {r: pid for r, (where, pid) in enumerate(places) if where == here.pids}
        self._collectives = 0  # that this rank has begun
        self._left: dict[int, int] = {}  # ranks that have closed, after how many collectives
        self._told: list[Any] = []  # messages to the others, which may be under way
        self._because_of_others = False
        if group.size == MPI.COMM_WORLD.Get_size():
            if MpiTransport._kept is not None:  # everybody has closed that one, and is here
                MpiTransport._kept.Free()
                MpiTransport._kept = None
            mpi.finalise_if(self._all_have_left)

    # -- collectives of MPI ----------------------------------------------------------------

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        return agree_by_minimum(self, words)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if tensor.dtype.is_complex and op == ReduceOp.SUM:
            tensor = torch.view_as_real(tensor).view(-1)
        kind = _TYPES.get(tensor.dtype)
        undefined = tensor.dtype.is_floating_point and op in (ReduceOp.MIN, ReduceOp.MAX)
        if kind is None or undefined:
            super().allreduce(tensor, op)
            return
        operator = _LOGICAL[op] if tensor.dtype == torch.bool else _OPERATORS[op]
        step = MESSAGE // tensor.element_size()
        with self._guard():
            for start in range(0, tensor.numel(), step):
                piece = tensor[start : start + step]
                self._comm.Allreduce(MPI.IN_PLACE, [_buffer(piece), piece.numel(), kind], operator)

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        if output.nbytes > MESSAGE:
            super().allgather(source, output, counts)
            return
        with self._guard():
            lengths = [count * source.element_size() for count in counts]
            self._comm.Allgatherv(
                [_buffer(source), source.nbytes, MPI.BYTE],
                [_buffer(output), (lengths, offsets_of(lengths)), MPI.BYTE],
            )

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        data = as_bytes(tensor)
        with self._guard():
            for start in range(0, data.numel(), MESSAGE):
                piece = data[start : start + MESSAGE]
                self._comm.Bcast([_buffer(piece), piece.numel(), MPI.BYTE], root)

    def barrier(self) -> None:
        with self._guard():
            pass  # every collective begins with a barrier

    # -- messages --------------------------------------------------------------------------

    def _send(self, data: torch.Tensor, rank: int) -> Any:
        return self._comm.Isend([_buffer(data), data.numel(), MPI.BYTE], rank, _TAG)

    def _receive(self, data: torch.Tensor, rank: int) -> Any:
        return self._comm.Irecv([_buffer(data), data.numel(), MPI.BYTE], rank, _TAG)

    def _finish(self, pending: list[Any]) -> None:
        """Wait, without holding up `abort` and without burning a core for long."""
        started = looked = time.monotonic()
        nap = 0.0
        while not MPI.Request.Testall(pending):
            self.check_usable()
            now = time.monotonic()
            if now - started > _SPIN_SECONDS:
                nap = min(max(2 * nap, 20e-6), _LONGEST_NAP)
            if now - looked > _LOOK_SECONDS:
                looked = now
                self._look_after_others()
            time.sleep(nap)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        with super()._guard():
            self._collectives += 1
            self._finish([self._comm.Ibarrier()])
            yield

    # -- failure and the end ---------------------------------------------------------------

    def _look_after_others(self) -> None:
        posted = self._board.look()
        if posted is not None:
            raise posted
        for rank, pid in self._pids.items():
            if not _is_alive(pid):
                who = self.group.describe(rank)
                raise PeerLostError(f"{who} (pid {pid} on this host) has died", [rank])

        self._take_goodbyes()
        for rank, collectives in self._left.items():
            if collectives < self._collectives:
                raise PeerLostError(f"{self.group.describe(rank)} has shut down Horovod", [rank])

    def _announce(self, failure: HorovodInternalError) -> None:
        super()._announce(failure)
        self._because_of_others = bool(set(failure.ranks) - {self.rank})
        if self._because_of_others and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._tell_all(_LOST)

    def close(self) -> None:
        if self._closed:
            return
        whole = self._shut()
        if whole:
            self._board.say_goodbye()
        if not self._because_of_others:
            self._tell_all(_LEFT)
        if self.size == MPI.COMM_WORLD.Get_size():
            MpiTransport._kept = self._comm
        elif whole:
            self._comm.Free()  # after a failure it may have unfinished business, and is left

    def _tell_all(self, tag: int) -> None:
        number = torch.tensor([self._collectives])
        content = [_buffer(number), number.nbytes, MPI.BYTE]
        with suppress(MPI.Exception):  # somebody may be gone already
            self._told += [(self._comm.Isend(content, r, tag), number) for r in self._peers]

    def _take_goodbyes(self) -> None:
        number = torch.zeros(1, dtype=torch.int64)
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _LEFT, status):
            rank = status.Get_source()
            self._comm.Recv([_buffer(number), number.nbytes, MPI.BYTE], rank, _LEFT)
            self._left[rank] = int(number)

    def _all_have_left(self) -> bool:
        """For the end of the process: wait until all have closed; False where some have failed."""
        if not self._closed or self._because_of_others:
            return False
        nap = 0.0
        with suppress(MPI.Exception):
            while True:
                self._take_goodbyes()
                if len(self._left) == self.size - 1:
                    return True
                if self._comm.Iprobe(MPI.ANY_SOURCE, _LOST):
                    return False
                time.sleep(nap)
                nap = min(max(2 * nap, 20e-6), _LONGEST_NAP)
        return False


def _buffer(tensor: torch.Tensor) -> Any:
    """The tensor's memory as mpi4py takes it; numpy knows too few types to be in between."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
