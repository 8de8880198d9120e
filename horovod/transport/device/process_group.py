"""Collectives on accelerator tensors, on torch's NCCL and XCCL process groups.

Called by the transport selection. How a process group connects, fails and ends is in
`device_group`.

Unlike the other transports these do not wait for the data: a collective is queued, and later work
on the device's current stream sees its result. The engine either agrees with all ranks over host
memory before it calls, or it agrees while the device works (`horovod.engine.execution.lane`).
Either way the engine notices there that a rank is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed

from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import Group, Transport
from horovod.transport.device import nccl_sockets
from horovod.transport.device.device_group import DeviceGroup
from horovod.transport.division import as_bytes, cut

__all__ = ["DeviceTransport", "DeviceWork", "NcclTransport", "XcclTransport"]

_c10d: Any = torch.distributed  # its stubs lack the backends that are built conditionally

_OPERATORS = {
    ReduceOp.SUM: _c10d.ReduceOp.SUM,
    ReduceOp.MIN: _c10d.ReduceOp.MIN,
    ReduceOp.MAX: _c10d.ReduceOp.MAX,
    ReduceOp.PRODUCT: _c10d.ReduceOp.PRODUCT,
}
# Operators for truth values, which are reduced as bytes 0 and 1.
_LOGICAL = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
}


class DeviceTransport(DeviceGroup):
    """The collectives of ranks with a device each.

    A tensor in other memory than our device's is copied there and back.
    """

    vectored = True

    def __init__(self, group: Group, device: torch.device, host: Transport) -> None:
        self._options: dict[Any, Any] = {}  # options of an allreduce, by operator
        super().__init__(group, device, host)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        with self._guard():
            if not tensor.numel():
                return
            operand, operator = self._operand(tensor, op)
            self._start(operand, operator).wait()
            _put_back(operand, tensor)

    def allreduce_vector(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        scale: float = 1.0,
        wire: torch.dtype | None = None,
    ) -> None:
        """Reduce several tensors through one flat buffer: one call for each takes longer."""
        targets = [tensor for tensor in tensors if tensor.numel()]
        if not targets:
            return
        whole = targets[0]
        if len(targets) > 1:
            whole = torch.cat([target.view(-1) for target in targets])
        self.allreduce(whole.view(-1), op)
        if scale != 1.0:
            whole.mul_(scale)
        if len(targets) > 1:
            parts = torch.split_with_sizes(whole, [target.numel() for target in targets])
            torch._foreach_copy_([target.view(-1) for target in targets], list(parts))

    def allreduce_one(self, tensor: torch.Tensor, op: ReduceOp, scale: float, waits: bool) -> None:
        """Reduce one flat tensor of a floating-point type on our device, in fewer steps of Python.

        Args:
            tensor: The tensor, which is reduced in place.
            op: SUM, MIN, MAX or PRODUCT.
            scale: The factor for the result.
            waits: Whether the caller calls `await_stream` next.
        """
        if self._failure is not None or not tensor.numel():
            self.check_usable()
            return
        try:
            self._run(tensor, _OPERATORS[op])
            if scale != 1.0:
                tensor.mul_(scale)
            if waits:
                self._waiting_threads.append(threading.get_ident())
            else:
                self.mark_stream()
        except BaseException as error:
            self._raise_explained(error)

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> DeviceWork:
        """Queue the reduction of a flat tensor behind the work in the current stream.

        Args:
            tensor: A tensor on our device, of a type that the library reduces.
            op: SUM, MIN, MAX or PRODUCT.

        Returns:
            The reduction, for which a stream can wait.
        """
        self.check_usable()
        try:
            return DeviceWork(self, self._start(tensor, _OPERATORS[op]))
        except BaseException as error:
            self._raise_explained(error)

    def wait_for(self, work: Any) -> None:
        """Let the current stream wait for `work`, which torch returned for a collective."""
        self.check_usable()
        try:
            work.wait()
        except BaseException as error:
            self._raise_explained(error)

    def _raise_explained(self, error: BaseException) -> NoReturn:
        """Break the transport, and raise the error that names the lost rank.

        For calls of each bucket, where entering `_guard` beforehand would take as long as torch.
        """
        with self._guard():
            raise error
        raise AssertionError("unreachable: _guard raises")

    def _start(self, operand: torch.Tensor, operator: Any) -> Any:
        """Begin an allreduce in the library's own stream, and return torch's work for it."""
        options = self._options.get(operator)
        if options is None:
            options = self._options[operator] = _c10d.AllreduceOptions()
            options.reduceOp = operator
        return self._watched(self._process_group.allreduce([operand], options))

    def _run(self, operand: torch.Tensor, operator: Any) -> None:
        """Put an allreduce into the current stream itself, where torch can do that.

        That saves two waits: the library's own stream would first wait for the current one, and
        then the current one for it.
        """
        key = operator, "in the current stream"
        options = self._options.get(key)
        if options is None:
            options = self._options[key] = _c10d.AllreduceOptions()
            options.reduceOp = operator
            if hasattr(options, "asyncOp"):  # torch 2.8 and newer
                options.asyncOp = False
        work = self._process_group.allreduce([operand], options)
        if work is not None:
            self._watched(work).wait()

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
            self._watched(work).wait()
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
            self._watched(work).wait()
            _put_back(all_data, output)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self._guard():
            if not tensor.numel():
                return
            data = as_bytes(self._here(tensor))
            options = _c10d.BroadcastOptions()
            options.rootRank = root
            self._watched(self._process_group.broadcast([data], options)).wait()
            _put_back(data, tensor)

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """Exchange slices. Even a rank without data calls the library, for others may have some."""
        with self._guard():
            size = source.element_size()
            leaving, arriving = as_bytes(self._here(source)), as_bytes(self._here(output))
            work = self._process_group.alltoall_base(
                arriving,
                leaving,
                [count * size for count in receive_counts],
                [count * size for count in send_counts],
            )
            self._watched(work).wait()
            _put_back(arriving, output)

    def barrier(self) -> None:
        """Return once every rank has called it. Only this collective waits for the device."""
        with self._guard():
            token = torch.zeros(1, dtype=torch.int32, device=self.device)
            self._start(token, _c10d.ReduceOp.SUM).wait()
            if int(token):
                raise RuntimeError("the device returned a wrong sum")

    # -- tensors ---------------------------------------------------------------------------

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on our device: itself, or a copy."""
        return tensor.to(self.device)

    def _operand(self, tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, Any]:
        """Return the tensor on our device as a type that the library reduces, and its operator."""
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


class DeviceWork:
    """A reduction that a device is doing."""

    __slots__ = ("_transport", "_work")

    def __init__(self, transport: DeviceTransport, work: Any) -> None:
        self._transport = transport
        self._work = work

    def wait(self) -> None:
        """Let the stream that is current now wait for the result; this thread does not wait."""
        self._transport.wait_for(self._work)

    def is_completed(self) -> bool:
        """Return whether the device has finished the reduction."""
        return bool(self._work.is_completed())


class NcclTransport(DeviceTransport):
    """The transport of CUDA and ROCm devices."""

    name = "NCCL"
    backend = "ProcessGroupNCCL"
    settings: ClassVar[Mapping[str, str]] = {
        # Errors come back to us; by default torch's watchdog would end the process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        # When a rank is lost the watchdog would write a dump, and sleep for four times the dump's
        # time limit (a minute in all), while the thread that drops the process group waits for it.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
    }

    @classmethod
    def prepare_process(cls, neighbours: int) -> None:
        nccl_sockets.use_spare_cores(neighbours)


class XcclTransport(DeviceTransport):
    """The transport of Intel XPU devices."""

    name = "XCCL"
    backend = "ProcessGroupXCCL"


def _put_back(result: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a result to `target` if it was computed in other memory or as another type."""
    if result.data_ptr() == target.data_ptr():
        return
    if target.dtype.is_complex:
        target = torch.view_as_real(target).view(-1)
    elif result.dtype == torch.uint8:
        target = target.view(torch.uint8)
    target.copy_(result)
