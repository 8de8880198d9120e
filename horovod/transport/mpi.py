"""Collectives over MPI, through mpi4py. For `--mpi`, `mpirun` and fabrics that only MPI speaks.

MPI's own collectives are used where they do the whole job: counts below 2^31, types and operators
whose result MPI defines the same way on every rank. The rest goes through the sends and receives
of `pairwise`: half precision, which MPI does not know; 8- and 16-bit integers, whose sums Open
MPI's vector code saturates; minimum and maximum of floating-point numbers, where NaN depends on the
order of operands; very large tensors.

A blocking MPI call cannot be interrupted, and burns a core while it waits. So each collective
begins with a non-blocking barrier, which is polled ever more slowly while the others are busy
elsewhere: there a rank can be woken by `abort`, its own or another's (seen in the group's store),
and notices ranks of its host that died. MPI itself only does what then runs without waiting.
(`mpirun` usually ends the whole job when a rank dies.) A rank that was woken leaves its barrier
unfinished. MPI cannot cancel it, so that communicator is lost until the process ends.

A rank that closes tells the others in how many collectives it has taken part: a rank that waits for
it in a later one knows that it will not come. That rank then fails because of another and says so,
and the rank that closed ends without finalising MPI, which would wait for all ranks: so mpirun sees
its exit code, and names it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from mpi4py import MPI

from horovod.common import mpi
from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.common.host import is_running
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import Group
from horovod.transport.division import as_bytes, offsets_of
from horovod.transport.endpoints import RankLocation
from horovod.transport.pairwise import MESSAGE, PairwiseTransport

_DATA_TAG = 1  # tag of the messages of collectives
_LEFT_TAG = 2  # tag of a message to all: the sender has closed, after this many collectives
_LOST_TAG = 3  # tag of a message to all: the sender has failed because of others
_SPIN_SECONDS = 200e-6  # for which we poll without a break: the usual wait is shorter
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 0.002  # seconds
_LOOK_SECONDS = 0.5  # between looks, in a long wait, whether the others are well

_TYPES = {
    torch.bool: MPI.C_BOOL,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
}
_OPERATORS = {  # of numbers and of bool
    ReduceOp.SUM: (MPI.SUM, MPI.LOR),
    ReduceOp.MIN: (MPI.MIN, MPI.LAND),
    ReduceOp.MAX: (MPI.MAX, MPI.LOR),
    ReduceOp.PRODUCT: (MPI.PROD, MPI.LAND),
}


def communicator_of(group: Group) -> MPI.Intracomm:
    """Return a communicator of the group's ranks, in their order. Collective over the group."""
    world = MPI.COMM_WORLD.Get_group()
    members = world.Incl(list(group.global_ranks))
    try:
        return MPI.COMM_WORLD.Create_group(members, tag=_DATA_TAG)
    finally:
        members.Free()
        world.Free()


class MpiTransport(PairwiseTransport):
    """The transport of ranks in one MPI job.

    Args:
        group: The ranks.
        comm: A communicator that has exactly these ranks, in order. The transport owns it: `close`
            frees it, but a communicator of all ranks of the job is kept until all have closed.
    """

    name = "MPI"
    _closed_world: Any = None  # the communicator of all ranks that was closed last

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
        processes = self._comm.allgather((here.pids, here.pid))
        self._pids = {r: pid for r, (pids, pid) in enumerate(processes) if pids == here.pids}
        self._collectives = 0  # how many this rank has begun
        self._left: dict[int, int] = {}  # ranks that have closed, after how many collectives
        self._notices: list[Any] = []  # messages to the others, which may not have arrived yet
        self._because_of_others = False
        if group.size == MPI.COMM_WORLD.Get_size():
            if MpiTransport._closed_world is not None:  # all ranks have closed it, and are here
                MpiTransport._closed_world.Free()
                MpiTransport._closed_world = None
            mpi.finalise_if(self._all_have_left)

    # -- collectives of MPI ----------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if tensor.dtype.is_complex and op == ReduceOp.SUM:
            tensor = torch.view_as_real(tensor).view(-1)
        kind = _TYPES.get(tensor.dtype)
        undefined = tensor.dtype.is_floating_point and op in (ReduceOp.MIN, ReduceOp.MAX)
        if kind is None or undefined:
            super().allreduce(tensor, op)
            return
        operator = _OPERATORS[op][tensor.dtype == torch.bool]
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
        return self._comm.Isend([_buffer(data), data.numel(), MPI.BYTE], rank, _DATA_TAG)

    def _receive(self, data: torch.Tensor, rank: int) -> Any:
        return self._comm.Irecv([_buffer(data), data.numel(), MPI.BYTE], rank, _DATA_TAG)

    def _finish(self, pending: list[Any]) -> None:
        """Wait, without holding up `abort` and without burning a core for long."""
        started = looked = time.monotonic()
        nap = 0.0
        while not MPI.Request.Testall(pending):
            self.check_usable()
            now = time.monotonic()
            if now - started > _SPIN_SECONDS:
                nap = min(max(2 * nap, _SHORTEST_NAP), _LONGEST_NAP)
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
        """Raise if another rank has posted a failure, has died on this host, or has closed."""
        posted = self._board.look()
        if posted is not None:
            raise posted
        for rank, pid in self._pids.items():
            if not is_running(pid):
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
            self._send_to_all(_LOST_TAG)

    def close(self) -> None:
        if self._closed:
            return
        was_usable = self._shut()
        if was_usable:
            self._board.say_goodbye()
        if not self._because_of_others:
            self._send_to_all(_LEFT_TAG)
        if self.size == MPI.COMM_WORLD.Get_size():
            MpiTransport._closed_world = self._comm
        elif was_usable:
            self._comm.Free()  # not after a failure: operations on it may be unfinished

    def _send_to_all(self, tag: int) -> None:
        """Send the number of our collectives to all other ranks."""
        number = torch.tensor([self._collectives])
        content = [_buffer(number), number.nbytes, MPI.BYTE]
        with suppress(MPI.Exception):  # a rank may be gone already
            self._notices += [(self._comm.Isend(content, r, tag), number) for r in self._peers]

    def _take_goodbyes(self) -> None:
        """Note which ranks have told us that they have closed."""
        number = torch.zeros(1, dtype=torch.int64)
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _LEFT_TAG, status):
            rank = status.Get_source()
            self._comm.Recv([_buffer(number), number.nbytes, MPI.BYTE], rank, _LEFT_TAG)
            self._left[rank] = int(number)

    def _all_have_left(self) -> bool:
        """Wait, at the end of the process, until all ranks have closed; False if one failed."""
        if not self._closed or self._because_of_others:
            return False
        nap = 0.0
        with suppress(MPI.Exception):
            while True:
                self._take_goodbyes()
                if len(self._left) == self.size - 1:
                    return True
                if self._comm.Iprobe(MPI.ANY_SOURCE, _LOST_TAG):
                    return False
                time.sleep(nap)
                nap = min(max(2 * nap, _SHORTEST_NAP), _LONGEST_NAP)
        return False


def _buffer(tensor: torch.Tensor) -> Any:
    """Return the tensor's memory as mpi4py takes it, without numpy, which knows too few types."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
