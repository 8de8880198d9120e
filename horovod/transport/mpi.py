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
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from mpi4py import MPI

from horovod.common.exceptions import HorovodInternalError, PeerLostError, fresh_copy
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import Group, agree_by_minimum
from horovod.transport.failures import FailureBoard
from horovod.transport.pairwise import MESSAGE, PairwiseTransport, as_bytes, offsets_of
from horovod.transport.places import Place

_TAG = 1
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

    The communicator is handed over: nobody else uses it, and `close` frees it.
    """

    name = "MPI"

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
        here = Place.here()
        places = self._comm.allgather((here.pids, here.pid))
        self._pids = {r: pid for r, (where, pid) in enumerate(places) if where == here.pids}
        self._board = FailureBoard(group)
        self._failure: HorovodInternalError | None = None

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
            if self._failure is not None:
                raise fresh_copy(self._failure)
            now = time.monotonic()
            if now - started > _SPIN_SECONDS:
                nap = min(max(2 * nap, 20e-6), _LONGEST_NAP)
            if now - looked > _LOOK_SECONDS:
                looked = now
                self._look_after_others()
            time.sleep(nap)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        if self._failure is not None:
            raise fresh_copy(self._failure)
        try:
            self._finish([self._comm.Ibarrier()])
            yield
        except BaseException as error:
            failure = self._stop(self._explain(error))
            if isinstance(error, Exception):
                raise fresh_copy(failure) from error
            raise

    # -- failure and the end ---------------------------------------------------------------

    def _look_after_others(self) -> None:
        posted = self._board.look()
        if posted is not None:
            raise posted
        for rank, pid in self._pids.items():
            if not _is_alive(pid):
                who = self.group.describe(rank)
                raise PeerLostError(f"{who} (pid {pid} on this host) has died", [rank])

    def _explain(self, error: BaseException) -> HorovodInternalError:
        if isinstance(error, HorovodInternalError):
            return error
        me = self.group.describe(self.rank)
        return HorovodInternalError(f"{me} failed in a collective: {type(error).__name__}: {error}")

    def _stop(self, failure: HorovodInternalError) -> HorovodInternalError:
        if self._failure is None:
            self._failure = failure
            self._board.post(failure)
        return self._failure

    def abort(self, reason: str) -> None:
        self._stop(HorovodInternalError(reason))

    def close(self) -> None:
        if self._failure is None:
            self._failure = HorovodInternalError("Horovod has been shut down")
            self._board.say_goodbye()
            self._comm.Free()  # after a failure it may have unfinished business, and is left


def _buffer(tensor: torch.Tensor) -> Any:
    """The tensor's memory as mpi4py takes it; numpy knows too few types to be in between."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
