"""Looking after ranks while a device works. Used by the device transports.

A device that waits for a rank which is gone does so for ever, and with it the program: nobody calls
a transport meanwhile that would notice. A device that has failed (an assertion in a kernel, say)
keeps those of the other ranks waiting as well: asking it raises an error, which they are told.
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
_LEAVE_SECONDS = 3.0  # that the device may take to finish what a rank needed that has left since
_REPORTED = "the library has reported an error: what it printed to stderr says which"


class WatchedTransport(Protocol):
    """A device transport, as its watch sees it."""

    device: torch.device
    host: Transport

    def is_busy(self) -> bool:
        """Whether the device has still to finish something."""

    def has_failed(self) -> bool:
        """Whether the library has reported an error."""

    def own_failure(self, error: BaseException) -> HorovodInternalError:
        """Return the error for everybody where this rank's device or library has failed."""

    def find_leaver(self) -> HorovodInternalError | None:
        """Return an error about a rank that has shut down, if one has."""

    def give_up(self, failure: HorovodInternalError) -> None:
        """Break the transport, for this reason if nobody posted another."""


class DeviceWatch:
    """A thread that looks whether all ranks live, while the device works."""

    def __init__(self, transport: WatchedTransport) -> None:
        self._transport = weakref.ref(transport)
        self._device = transport.device
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-device-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
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
    """Make it the current one of this thread: by default that is the first, and not this rank's."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
