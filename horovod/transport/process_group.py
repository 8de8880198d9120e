"""Collectives on accelerator tensors, on torch's NCCL and XCCL process groups.

The groups are built directly on our authenticated store, never with `init_process_group`: the
default group is the user's. Called by the transport selection.

Unlike the other transports these do not wait for the data: a collective is queued, and whatever
follows on the device's current stream sees its result. Before the engine calls, it has agreed with
all ranks over host memory; or it agrees while the device works (`horovod.engine.lane`). Either way
a rank that is lost is noticed there, and `abort` ends what hangs on the device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed

from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import DEVICE, Group, Transport
from horovod.transport.breakable import BreakableTransport
from horovod.transport.device_watch import DeviceWatch, use_device
from horovod.transport.farewells import finish_or_end_process, finish_or_leave
from horovod.transport.pairwise import as_bytes, cut
from horovod.transport.store_adapter import StoreForTorch

__all__ = ["DeviceTransport", "DeviceWork", "NcclTransport", "XcclTransport"]

_FOREVER = timedelta(days=3650)  # the engine's stall inspector decides what takes too long
_LOST_SECONDS = 1.0  # that others may take to notice that a rank is lost, after this library
_LOOK_SECONDS = 0.1  # between looks whether the ranks still come, while a group connects

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

    def __init__(self, group: Group, device: torch.device, host: Transport) -> None:
        super().__init__(group)
        self.device = device
        self.host = host  # the ranks' transport for host memory: it knows who is gone
        self._plans: dict[Any, Any] = {}  # options of an allreduce, by operator
        self._last: Any = None  # the work that was begun last
        self._waiters: list[int] = []  # threads that wait for what is in their streams
        self._mark: _StreamMark | None = None  # what tells of work in the current stream
        self.graphs: list[Callable[[], object]] = []  # let go of graphs with collectives of ours
        self._was_idle = False  # whether that was finished when the transport broke
        self._watch: DeviceWatch | None = None
        self._store = StoreForTorch(group.store, group.config.gloo_timeout_seconds)
        with _environment(self.settings):
            self._process_group: Any = self._make_group()
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        if self.size > 1:
            self._watch = DeviceWatch(self)

    def _make_group(self) -> Any:
        """The process group of torch's, which connects with its first collective."""
        made = getattr(_c10d, self.backend, None)
        if made is None:
            raise ValueError(f"this build of torch {torch.__version__} has no {self.name}")
        options = made.Options()
        options._timeout = _FOREVER
        return made(self._store, self.rank, self.size, options)

    def _connect(self) -> None:
        """Connect now, while everybody is here, in a thread that can be left behind if it hangs."""
        failures: list[BaseException] = []

        def meet() -> None:
            try:
                use_device(self.device)
                self.barrier()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=meet, name="hvd-device-connect", daemon=True)
        thread.start()
        seconds = self.group.config.gloo_timeout_seconds
        deadline = time.monotonic() + seconds
        while True:
            thread.join(_LOOK_SECONDS)
            if not thread.is_alive():
                break
            try:
                self.group.check_meeting()
                self.host.check_peers()
            except Exception as error:
                self._break(self.own_failure(error))
                raise
            if time.monotonic() > deadline:
                raise self._break(
                    HorovodInternalError(
                        f"{self.group.describe(self.rank)} could not connect with the other ranks "
                        f"by {self.name} on {self.device} within {seconds:g} s "
                        f"(HOROVOD_GLOO_TIMEOUT_SECONDS): see what {self.name}_DEBUG=INFO prints, "
                        f"and choose the network by {self.name}_SOCKET_IFNAME if there are several"
                    )
                )
        if failures:
            raise failures[0]

    # -- collectives -----------------------------------------------------------------------

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
        """Several tensors go through one flat buffer: one call for each would take longer."""
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
        """The same for one flat tensor of a floating-point type, on our device, in fewer steps.

        With `waits` the caller calls `await_stream` next.
        """
        if self._failure is not None or not tensor.numel():
            self.check_usable()
            return
        try:
            self._run(tensor, _OPERATORS[op])
            if scale != 1.0:
                tensor.mul_(scale)
            if waits:
                self._waiters.append(threading.get_ident())
            else:
                self.mark_stream()
        except BaseException as error:
            with self._guard():  # which explains it
                raise error

    def start_allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> DeviceWork:
        """Queue the reduction of a flat tensor of a usual type behind the current stream's work."""
        with self._guard():
            return DeviceWork(self, self._start(tensor, _OPERATORS[op]))

    def wait_for(self, work: Any) -> None:
        """Let the current stream wait for what torch calls a work."""
        with self._guard():
            work.wait()

    def _start(self, operand: torch.Tensor, operator: Any) -> Any:
        options = self._plans.get(operator)
        if options is None:
            options = self._plans[operator] = _c10d.AllreduceOptions()
            options.reduceOp = operator
        return self._watched(self._process_group.allreduce([operand], options))

    def _run(self, operand: torch.Tensor, operator: Any) -> None:
        """Put an allreduce into the current stream itself, where torch can: nothing goes beside it.

        A stream of the library's own would first wait for this one, and this one then for it.
        """
        key = operator, "in the current stream"
        options = self._plans.get(key)
        if options is None:
            options = self._plans[key] = _c10d.AllreduceOptions()
            options.reduceOp = operator
            if hasattr(options, "asyncOp"):  # torch 2.8 and newer
                options.asyncOp = False
        work = self._process_group.allreduce([operand], options)
        if work is not None:
            self._watched(work).wait()

    def await_stream(self) -> None:
        """Let the host wait until the device has done what the current stream was given."""
        try:
            torch.get_device_module(self.device).current_stream(self.device).synchronize()
        finally:
            if self._waiters:
                self._waiters.pop()
        self.check_usable()  # or the device has given up in the middle

    def mark_stream(self) -> None:
        """Count the device as busy until it has done what the current stream was given."""
        if self._mark is None:
            self._mark = _StreamMark(self.device)
        self._mark.record()
        self._last = self._mark

    def _watched(self, work: Any) -> Any:
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._last = work  # else nothing is done now, but in each replay of the graph
        return work

    def is_busy(self) -> bool:
        """Whether the device has still to finish something. Any thread may call.

        To torch, work is complete as well when the library has reported an error, although the
        device still waits.
        """
        if self._waiters:
            return True
        work = self._last
        return work is not None and (not work.is_completed() or self.has_failed())

    def has_failed(self) -> bool:
        """Whether the library has reported an error, as far as this version of torch tells."""
        find_error = getattr(self._process_group, "get_error", None)
        return find_error is not None and find_error().name != "SUCCESS"

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
        """Called by all ranks even where nothing goes in or out: others may exchange something."""
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
        """The only one that waits on the host."""
        with self._guard():
            token = torch.zeros(1, dtype=torch.int32, device=self.device)
            self._start(token, _c10d.ReduceOp.SUM).wait()
            if int(token):
                raise RuntimeError("the device returned a wrong sum")

    # -- tensors ---------------------------------------------------------------------------

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
        known = self._failure or self._board.look() or self._find_lost()
        return known or self.own_failure(error)

    def own_failure(self, error: BaseException) -> HorovodInternalError:
        """Return the error for everybody where this rank's device or library has failed."""
        me = self.group.describe(self.rank)
        return HorovodInternalError(f"{me} failed in {self.name} on {self.device}: {error}")

    def _find_lost(self) -> HorovodInternalError | None:
        """Look, for a moment, whether a rank is gone."""
        deadline = time.monotonic() + _LOST_SECONDS
        while time.monotonic() < deadline:
            try:
                self.host.check_peers()
            except HorovodInternalError as lost:
                return lost
            time.sleep(_LOST_SECONDS / 50)
        return self._board.look() or self.find_leaver()

    def find_leaver(self) -> PeerLostError | None:
        """Return an error about a rank that has shut down, if one has."""
        for rank in range(self.size):
            if rank != self.rank and self._board.said_goodbye(rank):
                who = self.group.describe(rank)
                return PeerLostError(f"{who} has shut down Horovod", [rank])
        return None

    def give_up(self, failure: HorovodInternalError) -> None:
        """Break the transport, for this reason if nobody posted another. Any thread may call."""
        self._break(self._board.look() or failure)

    @property
    def interrupted(self) -> bool:
        """Whether the device had not finished when the transport broke: then results are nonsense.

        It is known before the device is free again. Until it is known, it counts as true.
        """
        return self._failure is not None and not self._closed and not self._was_idle

    def _wake(self, failure: HorovodInternalError) -> None:
        """End what runs on our device; the engine of every other rank calls it there as well.

        The device is free again within moments. The library takes longer to let go of its threads
        and connections: nobody waits for that, unless it never comes to an end.
        """
        try:
            self._was_idle = not self.is_busy()
        except Exception:  # the device itself has failed
            self._was_idle = False
        process_group, self._process_group, self._last = self._process_group, None, None
        if process_group is not None:
            me = self.group.describe(self.rank)
            finish_or_end_process(
                process_group.abort,
                f"{me} could not abort {self.name} on {self.device} ({failure})",
            )
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        """The library ends only when no graph refers to it any more."""
        graphs, self.graphs = self.graphs, []
        for forget in graphs:
            forget()

    def close(self) -> None:
        if self._closed:
            return
        whole = self._shut()
        if self._watch is not None:
            self._watch.stop()
        if whole and self.size > 1:
            self._board.say_goodbye()
        self._forget_graphs()
        process_group, self._process_group = self._process_group, None
        if whole and process_group is not None:
            device = self.device

            def shut_down() -> None:
                torch.get_device_module(device).synchronize(device)
                process_group.shutdown()

            me = self.group.describe(self.rank)
            finish_or_leave(shut_down, f"{me} could not shut down {self.name} on {device}")


class _StreamMark:
    """A moment in the work of a stream that is moved on again and again."""

    __slots__ = ("_current_stream", "_device", "_event")

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._device = device
        self._event = module.Event()
        self._current_stream = module.current_stream

    def record(self) -> None:
        """Mark what the current stream has been given up to now."""
        self._event.record(self._current_stream(self._device))

    def is_completed(self) -> bool:
        """Whether the device has got there: what torch asks a work."""
        return bool(self._event.query())


class DeviceWork:
    """A reduction that is under way on a device."""

    __slots__ = ("_transport", "_work")

    def __init__(self, transport: DeviceTransport, work: Any) -> None:
        self._transport = transport
        self._work = work

    def wait(self) -> None:
        """Let the stream that is current now wait for the result, and not the host."""
        self._transport.wait_for(self._work)

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return bool(self._work.is_completed())


class NcclTransport(DeviceTransport):
    """CUDA and ROCm devices."""

    name = "NCCL"
    backend = "ProcessGroupNCCL"
    settings: ClassVar[Mapping[str, str]] = {
        # Errors come back to us; by default torch's watchdog would end the process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        # When a rank is lost the watchdog would write a dump, and sleep for four times as long as
        # it may take (a minute), while whoever drops the process group waits for it.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
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
