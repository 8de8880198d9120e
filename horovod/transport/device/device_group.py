"""The life of a torch process group on accelerators: it connects, is watched, fails and ends.

`DeviceGroup` is the base of the device transports; `process_group` adds the collectives. The
process group of torch is built directly on our authenticated store, never with
`init_process_group`: the default group is the user's.

A collective returns before the device has done it, so a failure may show when nobody is calling. A
thread (`device_watch`) looks after the other ranks while the device works, and `abort` ends what
hangs on the device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed

from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.transport.base import DEVICE, Group, Transport
from horovod.transport.breakable import BreakableTransport
from horovod.transport.device.device_watch import DeviceWatch, use_device
from horovod.transport.device.farewells import finish_or_end_process, finish_or_leave
from horovod.transport.device.store_adapter import StoreForTorch

_NO_TIMEOUT = timedelta(days=3650)  # the engine's stall inspector decides what takes too long
_LOST_SECONDS = 1.0  # for other transports to notice a loss that this library reported
_LOOK_SECONDS = 0.1  # between looks whether the ranks still come, while a group connects


class DeviceGroup(BreakableTransport):
    """A process group of ranks with a device each, without its collectives.

    Args:
        group: The ranks.
        device: The device of this rank.
        host: The ranks' transport for host memory, which knows who is gone. It is not closed here.
    """

    media = (DEVICE,)
    backend: ClassVar[str]  # the name of the class in torch.distributed
    settings: ClassVar[Mapping[str, str]] = {}  # environment while the process group is made

    def __init__(self, group: Group, device: torch.device, host: Transport) -> None:
        super().__init__(group)
        self.device = device
        self.host = host
        self.graphs: list[Callable[[], object]] = []  # each drops a graph with collectives of ours
        self._last_work: Any = None  # the work that was begun last
        self._stream_mark: StreamMark | None = None  # tells when the current stream gets there
        self._waiting_threads: list[int] = []  # threads in `await_stream`
        self._was_idle = False  # whether the device had finished when the transport broke
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

    @classmethod
    def prepare_process(cls, neighbours: int) -> None:
        """Set what the library reads once in a process, before its first connection.

        Args:
            neighbours: Number of ranks that share this machine's cores.
        """

    def _make_group(self) -> Any:
        """Make torch's process group, which connects with its first collective."""
        kind = getattr(torch.distributed, self.backend, None)
        if kind is None:
            raise ValueError(f"this build of torch {torch.__version__} has no {self.name}")
        options = kind.Options()
        options._timeout = _NO_TIMEOUT
        return kind(self._store, self.rank, self.size, options)

    def _connect(self) -> None:
        """Connect now, while all ranks are here, in a thread that is left behind if it hangs."""
        failures: list[BaseException] = []

        def connect() -> None:
            try:
                use_device(self.device)
                self.barrier()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=connect, name="hvd-device-connect", daemon=True)
        thread.start()
        seconds = self.group.config.gloo_timeout_seconds
        deadline = time.monotonic() + seconds
        while True:
            thread.join(_LOOK_SECONDS)
            if not thread.is_alive():
                break
            try:
                self.group.check_rendezvous()
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

    # -- what the device still does ----------------------------------------------------------

    def await_stream(self) -> None:
        """Block this thread until the device has done the work in its current stream."""
        try:
            torch.get_device_module(self.device).current_stream(self.device).synchronize()
        finally:
            if self._waiting_threads:
                self._waiting_threads.pop()
        self.check_usable()  # the device may have given up in the middle

    def mark_stream(self) -> None:
        """Count the device as busy until it has done the work in the current stream."""
        if self._stream_mark is None:
            self._stream_mark = StreamMark(self.device)
        self._stream_mark.record()
        self._last_work = self._stream_mark

    def _watched(self, work: Any) -> Any:
        """Remember `work` as what the device does last, and return it."""
        # While a graph is captured nothing runs: the work is done in each replay of the graph.
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._last_work = work
        return work

    def is_busy(self) -> bool:
        """Return whether the device has not finished its work. Any thread may call.

        torch also calls work complete when the library has reported an error, although the device
        still waits.
        """
        if self._waiting_threads:
            return True
        work = self._last_work
        return work is not None and (not work.is_completed() or self.has_failed())

    def has_failed(self) -> bool:
        """Return whether the library has reported an error, as far as this torch can tell."""
        find_error = getattr(self._process_group, "get_error", None)
        return find_error is not None and find_error().name != "SUCCESS"

    # -- failure and the end ---------------------------------------------------------------

    @contextmanager
    def _guard(self) -> Iterator[None]:
        refused: ValueError | None = None
        with super()._guard():
            try:
                yield
            except ValueError as error:
                # Raised by all ranks before anything was sent: it must not break the transport.
                refused = error
        if refused is not None:
            raise refused

    def _explain(self, error: BaseException) -> HorovodInternalError:
        known = self._failure or self._board.look() or self._find_lost()
        return known or self.own_failure(error)

    def own_failure(self, error: BaseException) -> HorovodInternalError:
        """Return the error that all ranks raise when this rank's device or library has failed."""
        me = self.group.describe(self.rank)
        return HorovodInternalError(f"{me} failed in {self.name} on {self.device}: {error}")

    def _find_lost(self) -> HorovodInternalError | None:
        """Return an error about a lost rank, if one is noticed within `_LOST_SECONDS`.

        The library often reports a loss before the transport for host memory has noticed it.
        """
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
        """Break the transport, for this reason if no rank posted another. Any thread may call."""
        self._break(self._board.look() or failure)

    @property
    def interrupted(self) -> bool:
        """Whether the device had work to finish when the transport broke: its results are wrong.

        The answer is known before the device is free again. Until it is known, it is True.
        """
        return self._failure is not None and not self._closed and not self._was_idle

    def _wake(self, failure: HorovodInternalError) -> None:
        """End what runs on our device; the engines of the other ranks do the same on theirs.

        The device is free again within moments. The library takes longer to release its threads
        and connections: no caller waits for that, but a call that hangs ends the process.
        """
        try:
            self._was_idle = not self.is_busy()
        except Exception:  # the device itself has failed
            self._was_idle = False
        process_group, self._process_group, self._last_work = self._process_group, None, None
        if process_group is not None:
            me = self.group.describe(self.rank)
            finish_or_end_process(
                process_group.abort,
                f"{me} could not abort {self.name} on {self.device} ({failure})",
            )
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Drop all graphs with our collectives: the library ends only when none refers to it."""
        graphs, self.graphs = self.graphs, []
        for forget in graphs:
            forget()

    def close(self) -> None:
        if self._closed:
            return
        was_usable = self._shut()
        if self._watch is not None:
            self._watch.stop()
        if was_usable and self.size > 1:
            self._board.say_goodbye()
        self._forget_graphs()
        process_group, self._process_group = self._process_group, None
        if was_usable and process_group is not None:
            device = self.device

            def shut_down() -> None:
                torch.get_device_module(device).synchronize(device)
                process_group.shutdown()

            me = self.group.describe(self.rank)
            finish_or_leave(shut_down, f"{me} could not shut down {self.name} on {device}")


class StreamMark:
    """A position in the work of a stream. It stands for torch's work in `_last_work`."""

    __slots__ = ("_current_stream", "_device", "_event")

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._device = device
        self._event = module.Event()
        self._current_stream = module.current_stream

    def record(self) -> None:
        """Move the mark behind everything that the current stream has been given."""
        self._event.record(self._current_stream(self._device))

    def is_completed(self) -> bool:
        """Return whether the device has passed the mark."""
        return bool(self._event.query())


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the library reads when it starts, except those that the user has set."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
