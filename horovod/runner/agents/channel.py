"""An authenticated connection that never blocks, to a host whose agent was not started by us.

`channel_link` and `link_server` use it in the launcher, `relay` on the host: one that has joined,
or a Spark task. The protocol is `horovod.common.wire`'s. Messages of the launcher:

- ``{"agent": length}``: start an agent, whose source of so many bytes follows as input
- ``{"input": true}`` with bytes for the agent's stdin
- ``{"end": "done"}``: the host is not needed any more; ``{"end": "again"}``: it is to connect once
  more, as another host; ``{"end": "refused", "why": text}``: it cannot take part.

Messages of a host: first what it is (`joining`, or `horovod.spark.task.relay.describe`), then
``{"output": true}`` and ``{"errors": true}`` with bytes of the agent's stdout and stderr, at last
``{"exit": code}``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from horovod.common.wire import Message, Session

_CHUNK = 1 << 18
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A peer whose machine has gone is noticed after a minute."""


class LinkChannel:
    """A socket and the state of the protocol on it."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.socket = sock
        self.session = session
        self._unsent = bytearray()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._unsent += session.take_output()

    @property
    def unsent(self) -> int:
        """Bytes that wait for room in the socket."""
        return len(self._unsent)

    def receive(self) -> list[Message] | None:
        """The messages that have come; None at the end. `OSError` when the connection is broken.

        `BlockingIOError` when nothing is there. Handshakes may leave something to `flush`.
        """
        data = self.socket.recv(_CHUNK)
        if not data:
            return None
        try:
            return self.session.feed(data)
        finally:
            self._unsent += self.session.take_output()

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send as much as the socket takes; `flush` sends the rest."""
        self._unsent += self.session.seal(header, body)
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as possible. A broken connection is `receive`'s to tell."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def finish(self) -> None:
        """Nothing more will be sent: the peer's `receive` comes to its end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()
