"""The device transport's own code without a device: Gloo and CPU tensors in NCCL's place.

`in_nccls_place` has `select.for_device` choose it for CPU tensors. What NCCL does with its store is
imitated, a unique id under a small number, and that `abort` ends what waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from horovod.transport import select
from horovod.transport.base import Group, Transport
from horovod.transport.device.process_group import DeviceTransport
from tests.ranks import PATIENCE

UNIQUE_ID_BYTES = 128
CPU = torch.device("cpu")


class GlooInNcclsPlace(DeviceTransport):
    """What NCCL does, done by Gloo."""

    name = "GLOO"
    backend = "ProcessGroupGloo"

    def _make_group(self) -> Any:
        self._exchange_unique_id()
        before = _sockets()
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=PATIENCE)
        options._threads = 2
        group = dist.ProcessGroupGloo(self._store, self.rank, self.size, options)
        return Abortable(group, _sockets() - before)

    def _exchange_unique_id(self) -> None:
        """As torch does for NCCL, under the number of the communicator."""
        if self.rank == 0:
            self._store.set("0", b"i" * UNIQUE_ID_BYTES)
        elif len(self._store.get("0")) != UNIQUE_ID_BYTES:
            raise RuntimeError("Invalid size for ncclUniqueId")


class Abortable:
    """A group like NCCL's: work is queued and done in turn, and `abort` ends what waits.

    Gloo moves bytes; sums are made here, where all types and special values come out right.
    """

    def __init__(self, group: Any, descriptors: set[int]) -> None:
        self._group = group
        self._descriptors = descriptors
        self._queue = ThreadPoolExecutor(1, "hvd-test-device")
        self.error = "SUCCESS"

    def get_error(self) -> Any:
        """What torch says that the library has reported."""
        return SimpleNamespace(name=self.error)

    def _enqueue(self, function: Callable[..., None], *arguments: Any) -> Work:
        return Work(self._queue.submit(function, *arguments))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return self._enqueue(self._allreduce, tensors[0], options.reduceOp)

    def _allreduce(self, tensor: torch.Tensor, operator: Any) -> None:
        whole = torch.stack([part.view(tensor.dtype) for part in self._everyone(tensor)])
        reduce = next(function for known, function in _REDUCE.items() if operator == known)
        tensor.copy_(reduce(whole).to(tensor.dtype))

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any) -> Work:
        def run(output: torch.Tensor, shares: list[torch.Tensor]) -> None:
            whole = torch.cat(list(shares))
            self._allreduce(whole, options.reduceOp)
            start = sum(share.numel() for share in shares[: self._group.rank()])
            output.copy_(whole[start : start + output.numel()])

        return self._enqueue(run, outputs[0], inputs[0])

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, options: Any) -> Work:
        return self.reduce_scatter([output], [list(whole.split(output.numel()))], options)

    def allgather(self, outputs: Any, inputs: Any) -> Work:
        def run(shares: list[torch.Tensor], mine: torch.Tensor) -> None:
            padded = mine.new_zeros(max(share.numel() for share in shares))
            padded[: mine.numel()] = mine
            for share, got in zip(shares, self._everyone(padded), strict=True):
                share.copy_(got[: share.numel()])

        return self._enqueue(run, outputs[0], inputs[0])

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor) -> Work:
        return self.allgather([list(output.split(mine.numel()))], [mine])

    def broadcast(self, tensors: Any, options: Any) -> Work:
        return self._enqueue(lambda: self._group.broadcast(tensors, options).wait())

    def alltoall_base(self, *arguments: Any) -> Work:
        return self._enqueue(lambda: self._group.alltoall_base(*arguments).wait())

    def _everyone(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, as bytes."""
        mine = tensor.contiguous().view(torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.allgather([everyone], [mine]).wait()
        return everyone

    def abort(self) -> None:
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as link:
                link.getpeername()  # fails for one that listens: ending it would be Gloo's end
                link.shutdown(socket.SHUT_RDWR)
        self._queue.shutdown(wait=False, cancel_futures=True)

    def shutdown(self) -> None:
        """Whoever drops the group ends its connections."""
        self._queue.shutdown()


class Work:
    """What torch returns for a queued collective."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()


_REDUCE: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda whole: _wide(whole).sum(0),
    dist.ReduceOp.MIN: lambda whole: whole.amin(0),
    dist.ReduceOp.MAX: lambda whole: whole.amax(0),
    dist.ReduceOp.PRODUCT: lambda whole: _wide(whole).prod(0),
}


def _wide(whole: torch.Tensor) -> torch.Tensor:
    return whole.float() if whole.dtype in (torch.float16, torch.bfloat16) else whole


def _sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found


@contextlib.contextmanager
def in_nccls_place() -> Iterator[None]:
    """Let CPU tensors go the way of device tensors, wherever the engine asks for a transport."""
    with mock.patch.object(select, "device_transports", return_value={"cpu": GlooInNcclsPlace}):
        yield


def build(group: Group, host: Transport) -> Transport:
    """What `select.for_device` makes of ranks that have a device each."""
    os.environ["NCCL_HOSTID"] = f"host of rank {group.rank}"
    with in_nccls_place():
        return select.for_device(group, host, group.size, CPU)
