"""Asks a `HostDiscovery` again and again, in a thread, so that the driver's loop never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from horovod.runner.elastic.discovery import HostDiscovery

_CLOSE_SECONDS = 5.0


class HostPoller:
    """Calls `tell` with every answer, or with the exception that came instead, from its thread.

    It asks again `pause` seconds after each answer.
    """

    def __init__(
        self,
        discovery: HostDiscovery,
        tell: Callable[[dict[str, int] | Exception], None],
        pause: float,
    ) -> None:
        self._discovery = discovery
        self._tell = tell
        self._pause = pause
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="horovod-discovery", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._closing.is_set():
            answer: dict[str, int] | Exception
            try:
                answer = self._discovery.find_available_hosts_and_slots()
            except Exception as error:  # whatever a cluster's own discovery may raise
                answer = error
            if self._closing.is_set():
                return
            self._tell(answer)
            self._closing.wait(self._pause)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ask no more; also ends a script that is running."""
        self._closing.set()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.running and time.monotonic() < deadline:
            self._discovery.close()  # again: an attempt may just have begun
            self._thread.join(0.1)
