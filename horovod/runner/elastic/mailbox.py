"""Messages from other threads to the launcher's loop, which wakes up for them.

The store's thread and the poller's leave them; `driver` takes them in its own thread.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress
from typing import Any


class Mailbox:
    """Anybody may `post`; the owner watches `descriptor` and takes all."""

    def __init__(self) -> None:
        self._messages: deque[tuple[str, Any]] = deque()
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)

    @property
    def descriptor(self) -> int:
        """Becomes readable when there is something to take."""
        return self._wakeup.fileno()

    def post(self, kind: str, content: Any) -> None:
        self._messages.append((kind, content))
        with suppress(OSError):  # full of earlier calls, or nobody is interested any more
            self._waker.send(b"\0")

    def take_all(self) -> list[tuple[str, Any]]:
        """What has come, in its order."""
        with suppress(BlockingIOError):
            self._wakeup.recv(1 << 12)
        found = []
        while self._messages:
            found.append(self._messages.popleft())
        return found

    def close(self) -> None:
        self._wakeup.close()
        self._waker.close()
