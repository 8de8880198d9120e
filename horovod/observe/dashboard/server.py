"""Serve the page, its data and ``/metrics`` over HTTP, with aiohttp.

`dashboard` runs the server in the event loop of its thread. Every request needs the token: in the
link (``?token=``), as ``Authorization: Bearer``, or in the cookie that the first visit sets.
Without it, or under a foreign host name, every answer is 403.

A `Guarded` is around aiohttp's protocol of every connection. The launcher needs its descriptors for
the job: above a limit the connection that was idle longest is closed, so that nobody can lock the
owner out. A peer that sends or takes nothing for a while is closed, too.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import hmac
import ipaddress
import json
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from horovod.observe.dashboard import page, prometheus
from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.logs import OutputTails

_HOLD = 20.0
"""Seconds for which a page's question waits for something new."""
_PACE = 0.002
"""Seconds of delay per open page, so that many pages cost no more than few."""
_FAREWELL = 10.0
"""Seconds for open pages to learn of the job's end; a page that is silent for longer is closed."""
_MOST_PAGES = 1024
_SHUTDOWN = 0.5

_MOST_CONNECTIONS = 1024
_FIRST_REQUEST = 10.0
"""Seconds for the first bytes of a connection."""
_IDLE = 90.0
_SLOW = 10.0
"""Seconds for which a peer may leave an answer untaken."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Server": "horovod",
}


class Server:
    """The HTTP side of a dashboard. Only the event loop's thread may call its methods."""

    def __init__(
        self, board: Board, tails: OutputTails, token: str, listener: socket.socket
    ) -> None:
        self.connections = Connections()
        self._board = board
        self._tails = tails
        self._token = token
        self._listener = listener
        self._names = _own_names(listener)
        port = listener.getsockname()[1]
        self._cookie = f"horovod_dashboard_{port}"  # browsers do not tell ports apart
        # Not the token itself, which may open other jobs' pages: a browser keeps this value.
        self._visitor = hmac.new(token.encode(), b"cookie", hashlib.sha256).hexdigest()
        self._changed = asyncio.Event()
        self._asking = 0  # questions that are not answered yet
        self._returning: dict[int, float] = {}  # by page: when it was answered; it will ask again
        self._packed: dict[tuple[int, int], bytes] = {}  # answers for this version
        self._packed_version = -1
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.router.add_get("/", self._page)
        app.router.add_get("/changes", self._changes)
        app.router.add_get("/output", self._output)
        app.router.add_get("/rank", self._rank)
        app.router.add_get("/metrics", self._metrics)
        # No log of requests, because it would contain the token.
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN
        )
        await self._runner.setup()
        inner = self._runner.server
        assert inner is not None, "set up just now"
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Guarded(inner(), self.connections), sock=self._listener, backlog=128
        )

    def wake(self) -> None:
        """Answer the pages that wait for something new."""
        self._changed.set()
        self._changed.clear()

    async def finish(self) -> None:
        """Let open pages see the end of the job, and close."""
        deadline = time.monotonic() + _FAREWELL
        while (self._asking or self._expects_pages()) and time.monotonic() < deadline:
            self.wake()  # repeatedly, because a question that is about to wait would miss it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # the last answers are on their way
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # -- who may ask -----------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        if not self._is_ours(request.host) or not self._is_allowed(request):
            response: web.StreamResponse = web.Response(status=403)
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = web.Response(status=error.status)
        for name, value in _HEADERS.items():
            response.headers[name] = value
        return response

    def _is_ours(self, host: str) -> bool:
        """Return whether the host name is ours: a foreign name that leads here is an attack."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower().rstrip(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def _is_allowed(self, request: web.Request) -> bool:
        kind, _, value = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return _same(value.strip(), self._token)
        if request.path in ("/", "/metrics") and "token" in request.query:
            return _same(request.query["token"], self._token)
        return _same(request.cookies.get(self._cookie, ""), self._visitor)

    # -- what they get ---------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        response = web.Response(text=page.render(), content_type="text/html")
        response.headers["Content-Security-Policy"] = f"{page.policy()}; frame-ancestors 'none'"
        response.set_cookie(self._cookie, self._visitor, httponly=True, samesite="Strict", path="/")
        return response

    async def _changes(self, request: web.Request) -> web.Response:
        """Answer with what is new since a version and an event; wait if nothing is."""
        since, event = _number(request, "since"), _number(request, "event")
        page_number = _number(request, "page")  # 0: a client that need not ask again
        self._returning.pop(page_number, None)
        self._asking += 1
        try:
            await self._news(since)
            if page_number and self._board.ended is None and request.transport is not None:
                self._expect(page_number)
            return self._answer(since, event)
        finally:
            self._asking -= 1

    def _expect(self, page_number: int) -> None:
        """Note a page that gets an answer now and will ask again."""
        if len(self._returning) >= _MOST_PAGES:
            self._returning.pop(next(iter(self._returning)))
        self._returning[page_number] = time.monotonic()

    def _expects_pages(self) -> bool:
        """Return whether an open page between two questions has not heard of the end."""
        closed = time.monotonic() - _FAREWELL
        return any(answered > closed for answered in self._returning.values())

    async def _news(self, since: int) -> None:
        board = self._board
        deadline = time.monotonic() + _HOLD
        while board.version == since and board.ended is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except asyncio.TimeoutError:  # another class before Python 3.11
                return
        if since and board.ended is None:
            await asyncio.sleep(_PACE * len(self.connections))

    def _answer(self, since: int, event: int) -> web.Response:
        board = self._board
        if self._packed_version != board.version:
            self._packed_version = board.version
            self._packed.clear()
        packed = self._packed.get((since, event))
        if packed is None:
            packed = gzip.compress(_json(board.changes(since, event)), 1)
            if len(self._packed) < 64:
                self._packed[since, event] = packed
        response = web.Response(body=packed, content_type="application/json")
        response.headers["Content-Encoding"] = "gzip"
        return response

    async def _output(self, request: web.Request) -> web.Response:
        lines = self._tails.since(_number(request, "worker"), _number(request, "since"))
        return web.Response(body=_json({"lines": lines}), content_type="application/json")

    async def _rank(self, request: web.Request) -> web.Response:
        """Answer with the history of one worker since a version, and its stack."""
        worker, since = request.query.get("worker", ""), _number(request, "since")
        if len(worker) > 16:
            raise web.HTTPBadRequest
        found = self._board.rank_changes(worker, since if since <= self._board.version else 0)
        return web.Response(body=_json(found), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        response = web.Response(body=prometheus.render(self._board).encode())
        response.headers["Content-Type"] = prometheus.CONTENT_TYPE
        return response


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise web.HTTPBadRequest
    return int(text)


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _json(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def _own_names(listener: socket.socket) -> frozenset[str]:
    """Return the host names under which a browser may ask; addresses are always allowed."""
    names = {"localhost"}
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


# -- connections -----------------------------------------------------------------------------------


def most_connections() -> int:
    """Return a limit that leaves most of this process's descriptors to the job."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MOST_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(8, min(_MOST_CONNECTIONS, soft // 4))
    )


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
