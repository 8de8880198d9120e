"""Limit the number of connections to the page, and the time for which an idle peer holds one.

`server` puts a `Guarded` around aiohttp's protocol of every connection. The launcher needs its
descriptors for the job: above a limit the connection that was idle longest is closed, so that
nobody can lock the owner out. A peer that sends or takes nothing for a while is closed, too.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

_MOST = 1024
_FIRST_REQUEST = 10.0
"""Seconds for the first bytes of a connection."""
_IDLE = 90.0
_SLOW = 10.0
"""Seconds for which a peer may leave an answer untaken."""


def most_connections() -> int:
    """Return a limit that leaves most of this process's descriptors to the job."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(8, min(_MOST, soft // 4))


class Connections:
    """All connections to the page. Only the event loop's thread uses it."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most or most_connections()
        self.refused = 0
        self._open: dict[Guarded, None] = {}  # in order; the one that was idle longest comes first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Guarded) -> None:
        self._open[connection] = None
        if len(self._open) > self.most:
            self._abort(next(iter(self._open)))

    def touch(self, connection: Guarded) -> None:
        if self._open.pop(connection, self) is None:
            self._open[connection] = None

    def forget(self, connection: Guarded) -> None:
        self._open.pop(connection, None)

    def expire(self, now: float) -> None:
        """Close connections whose peers have been silent, or slow, for too long."""
        for connection in [each for each in self._open if each.is_overdue(now)]:
            self._abort(connection)

    def _abort(self, connection: Guarded) -> None:
        self.refused += 1
        self.forget(connection)
        connection.abort()


class Guarded(asyncio.Protocol):
    """Passes everything on to another protocol, and notes when the peer was last active."""

    def __init__(self, inner: Any, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.BaseTransport | None = None
        self._heard = time.monotonic()
        self._spoken = False
        self._full_since: float | None = None

    def is_overdue(self, now: float) -> bool:
        if self._full_since is not None:
            return now - self._full_since > _SLOW
        return now - self._heard > (_IDLE if self._spoken else _FIRST_REQUEST)

    def abort(self) -> None:
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        self._spoken = True
        self._connections.touch(self)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        result: bool | None = self._inner.eof_received()
        return result

    def pause_writing(self) -> None:
        self._full_since = time.monotonic()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._full_since = None
        self._inner.resume_writing()
