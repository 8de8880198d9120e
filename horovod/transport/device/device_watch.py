"""Looking after ranks while a device works. Used by the device transports.

A device that waits for a lost rank waits for ever, and so does the program: meanwhile nobody calls
a transport that would notice. A device that has failed (an assertion in a kernel, say) keeps the
devices of the other ranks waiting as well: asking it raises an error, and the other ranks are told.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.transport.base import Transport

_WATCH_SECONDS = 0.2  # between looks at the other ranks, while the device works
_LEAVE_SECONDS = 3.0  # for the device to finish work with a rank that has left meanwhile
_REPORTED = "the library has reported an error: what it printed to stderr says which"


class WatchedTransport(Protocol):
    """The part of a device transport that its watch uses."""

    device: torch.device
    host: Transport

    def is_busy(self) -> bool:
        """Return whether the device has not finished its work."""

    def has_failed(self) -> bool:
        """Return whether the library has reported an error."""

    def own_failure(self, error: BaseException) -> HorovodInternalError:
        """Return the error that all ranks raise when this rank's device or library has failed."""

    def find_leaver(self) -> HorovodInternalError | None:
        """Return an error about a rank that has shut down, if one has."""

    def give_up(self, failure: HorovodInternalError) -> None:
        """Break the transport, for this reason if no rank posted another."""


class DeviceWatch:
    """A thread that checks, while the device works, whether all ranks live."""

    def __init__(self, transport: WatchedTransport) -> None:
        self._transport = weakref.ref(transport)  # a thread must not keep it, and its device memory
        self._device = transport.device
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-device-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it may still look once."""
        self._stopped.set()

    def _run(self) -> None:
        """Look again and again until the transport is stopped, dropped or broken."""
        use_device(self._device)
        busy_since: float | None = None
        while not self._stopped.wait(_WATCH_SECONDS):
            transport = self._transport()
            if transport is None:
                return
            lost: HorovodInternalError | None = None
            try:
                if not transport.is_busy():
                    busy_since = None
                    continue
                transport.host.check_peers()
            except HorovodInternalError as error:
                lost = error
            except Exception as error:  # our own device has failed, and others wait for it
                lost = transport.own_failure(error)
            busy_since = busy_since or time.monotonic()
            if lost is None and time.monotonic() - busy_since > _LEAVE_SECONDS:
                lost, busy_since = transport.find_leaver(), None
                if lost is None and transport.has_failed():  # and nobody else knows of anything
                    lost = transport.own_failure(RuntimeError(_REPORTED))
            if lost is not None:
                transport.give_up(lost)
                return


def use_device(device: torch.device) -> None:
    """Make `device` the current one of this thread, which is the first device by default."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
