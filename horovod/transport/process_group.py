"""Collectives on accelerator tensors, on torch's NCCL and XCCL process groups.

The groups are built directly on our authenticated store, never with `init_process_group`: the
default group is the user's. Called by the transport selection.

Unlike the other transports these do not wait for the data: a collective is queued, and whatever
follows on the device's current stream sees its result. The engine has agreed with all ranks, over
host memory, before it calls; so a rank that is lost is noticed there, and `abort` ends what hangs
on the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import DEVICE, Group
from horovod.transport.breakable import BreakableTransport
from horovod.transport.pairwise import as_bytes, cut
from horovod.transport.store_adapter import StoreForTorch

__all__ = ["DeviceTransport", "NcclTransport", "XcclTransport"]

_FOREVER = timedelta(days=3650)  # the engine's stall inspector decides what takes too long

_c10d: Any = torch.distributed  # its stubs lack the backends that are built conditionally

_OPERATORS = {
    ReduceOp.SUM: _c10d.ReduceOp.SUM,
    ReduceOp.MIN: _c10d.ReduceOp.MIN,
    ReduceOp.MAX: _c10d.ReduceOp.MAX,
    ReduceOp.PRODUCT: _c10d.ReduceOp.PRODUCT,
}
# Of truth values kept as bytes 0 and 1.
_LOGICAL = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
}


class DeviceTransport(BreakableTransport):
    """The transport of ranks with a device each. Tensors of other devices pass through ours."""

    vectored = True
    media = (DEVICE,)
    backend: ClassVar[str]  # the class in torch.distributed
    settings: ClassVar[Mapping[str, str]] = {}  # environment while the process group is made

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        made = getattr(_c10d, self.backend, None)
        if made is None:
            raise ValueError(f"this build of torch {torch.__version__} has no {self.name}")
        self.device = device
        options = made.Options()
        options._timeout = _FOREVER
        self._store = StoreForTorch(group.store, group.config.gloo_timeout_seconds)
        with _environment(self.settings):
            self._process_group: Any = made(self._store, self.rank, self.size, options)
        try:
            self.barrier()  # connects now, while everybody is here
        except BaseException:
            self.close()
            raise

    # -- collectives -----------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        with self._guard():
            if not tensor.numel():
                return
            operand, operator = self._operand(tensor, op)
            options = _c10d.AllreduceOptions()
            options.reduceOp = operator
            self._process_group.allreduce([operand], options).wait()
            _put_back(operand, tensor)

    def allreduce_vector(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        if len(tensors) == 1:
            super().allreduce_vector(tensors, op, scale)
            return
        with self._guard():
            targets = [tensor for tensor in tensors if tensor.numel()]
            if not targets:
                return
            if self._takes(targets[0]):
                options = _c10d.AllreduceCoalescedOptions()
                options.reduceOp = _OPERATORS[op]
                self._process_group.allreduce_coalesced(targets, options).wait()
            else:
                for target in targets:
                    self.allreduce(target.view(-1), op)
            if scale != 1.0:
                torch._foreach_mul_(targets, scale)

    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        with self._guard():
            if not source.numel():
                return
            operand, operator = self._operand(source, op)
            scale = operand.numel() // source.numel()  # 2 for complex numbers
            shares = [count * scale for count in counts]
            result = operand.new_empty(shares[self.rank])
            options = _c10d.ReduceScatterOptions()
            options.reduceOp = operator
            if len(set(counts)) == 1:
                work = self._process_group._reduce_scatter_base(result, operand, options)
            else:
                inputs = [cut(operand, shares)]
                work = self._process_group.reduce_scatter([result], inputs, options)
            work.wait()
            _put_back(result, output)

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        with self._guard():
            if not output.numel():
                return
            mine, all_data = as_bytes(self._here(source)), as_bytes(self._here(output))
            if len(set(counts)) == 1:
                work = self._process_group._allgather_base(all_data, mine)
            else:
                lengths = [count * source.element_size() for count in counts]
                work = self._process_group.allgather([cut(all_data, lengths)], [mine])
            work.wait()
            _put_back(all_data, output)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self._guard():
            if not tensor.numel():
                return
            data = as_bytes(self._here(tensor))
            options = _c10d.BroadcastOptions()
            options.rootRank = root
            self._process_group.broadcast([data], options).wait()
            _put_back(data, tensor)

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """Called by all ranks even where nothing goes in or out: others may exchange something."""
        with self._guard():
            size = source.element_size()
            leaving, arriving = as_bytes(self._here(source)), as_bytes(self._here(output))
            self._process_group.alltoall_base(
                arriving,
                leaving,
                [count * size for count in receive_counts],
                [count * size for count in send_counts],
            ).wait()
            _put_back(arriving, output)

    def barrier(self) -> None:
        """The only one that waits on the host."""
        with self._guard():
            token = torch.zeros(1, dtype=torch.int32, device=self.device)
            self._process_group.allreduce([token]).wait()
            if int(token):
                raise RuntimeError("the device returned a wrong sum")

    # -- tensors ---------------------------------------------------------------------------

    def _takes(self, tensor: torch.Tensor) -> bool:
        """Whether `_operand` would be the tensor itself."""
        dtype = tensor.dtype
        strange = dtype is torch.bool or dtype is torch.int16 or dtype.is_complex
        return tensor.device == self.device and not strange

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def _operand(self, tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, Any]:
        """The tensor as types that the library adds up, and its operator for them."""
        tensor = self._here(tensor)
        if tensor.dtype == torch.bool:
            return tensor.view(torch.uint8), _OPERATORS[_LOGICAL[op]]
        if tensor.dtype == torch.int16:
            return tensor.to(torch.int32), _OPERATORS[op]
        if tensor.dtype.is_complex:
            if op != ReduceOp.SUM:
                raise ValueError(f"{self.name} reduces complex tensors by Sum and Average only")
            return torch.view_as_real(tensor).view(-1), _OPERATORS[op]
        return tensor, _OPERATORS[op]

    # -- failure and the end ---------------------------------------------------------------

    @contextmanager
    def _guard(self) -> Iterator[None]:
        refused: ValueError | None = None
        with super()._guard():
            try:
                yield
            except ValueError as error:  # before anything was sent, alike on all ranks
                refused = error
        if refused is not None:
            raise refused

    def _explain(self, error: BaseException) -> HorovodInternalError:
        known = self._failure or self._board.look()
        if known is not None:
            return known
        me = self.group.describe(self.rank)
        return HorovodInternalError(f"{me} failed in {self.name}: {error}")

    def _wake(self, failure: HorovodInternalError) -> None:
        """Ends what runs on our device; the engine of every other rank calls it there as well."""
        self._process_group.abort()

    def close(self) -> None:
        if self._closed:
            return
        if self._shut():
            torch.get_device_module(self.device).synchronize(self.device)
            self._process_group.shutdown()
        self._process_group = None


class NcclTransport(DeviceTransport):
    """CUDA and ROCm devices."""

    name = "NCCL"
    backend = "ProcessGroupNCCL"
    settings: ClassVar[Mapping[str, str]] = {
        # Errors come back to us; by default torch's watchdog would end the process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


class XcclTransport(DeviceTransport):
    """Intel XPU devices."""

    name = "XCCL"
    backend = "ProcessGroupXCCL"


def _put_back(result: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a result that was computed in other memory, or as another type, than `target`."""
    if result.data_ptr() == target.data_ptr():
        return
    if target.dtype.is_complex:
        target = torch.view_as_real(target).view(-1)
    elif result.dtype == torch.uint8:
        target = target.view(torch.uint8)
    target.copy_(result)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Variables that a library reads once, unless the user has set them."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
