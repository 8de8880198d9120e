"""Serves a `MemoryStore` to the ranks of one job.

The launcher starts one `StoreServer`; where a foreign launcher started the job, rank 0 does.
Imported through `horovod.common.store`. One daemon thread drives all connections without ever
blocking on one of them: a slow, silent or hostile peer costs the others nothing.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import resource
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from typing import Any

from horovod.common.logging import get_logger
from horovod.common.store.memory import MemoryStore
from horovod.common.store.parked_requests import ParkedRequests
from horovod.common.wire import Message, Session, WireError, check_key

_RECEIVE_BYTES = 1 << 18
_ACCEPT_PAUSE = 0.1
"""Seconds without accepting after the process ran out of file descriptors."""

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def _most_pending() -> int:
    """Return how many unfinished handshakes leave most of this process's descriptors free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(8, min(1024, soft // 4))


class _Connection:
    """One peer: the state of its protocol, and the answers that it has not read yet."""

    def __init__(self, sock: socket.socket, peer: str, session: Session, deadline: float) -> None:
        self.socket = sock
        self.peer = peer
        self.session = session
        self.handshake_deadline = deadline
        self.output: deque[memoryview] = deque()
        self.events = selectors.EVENT_READ
        self.is_open = True


class StoreServer:
    """A store at ``address:port`` for all processes that know the key.

    `rejected` counts the connections that were refused or broke the protocol. The 1st, 10th, 100th,
    ... of them is logged as a warning, all of them at level debug. `store` is the served store, for
    use inside this process.

    Args:
        host: The address to listen on; no other is used.
        key: The key of the job.
        port: The port to listen on; by default a free one.
        store: The store to serve, by default a new one. Several servers may share a store, to
            serve it on several addresses.
    """

    def __init__(
        self, host: str, key: bytes, port: int = 0, *, store: MemoryStore | None = None
    ) -> None:
        self._key = check_key(key)
        self._handshake_timeout = 10.0  # seconds
        self._max_pending = _most_pending()  # unfinished handshakes: of more, the oldest is dropped
        self._pid = os.getpid()
        self.store = MemoryStore() if store is None else store
        self.store.secret = key  # the clients derive keys from the same
        self.rejected = 0
        self._next_warning = 1
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.address: str = host
        self.port: int = self._listener.getsockname()[1]
        self._waker_in, self._waker_out = socket.socketpair()
        self._waker_in.setblocking(False)
        self._waker_out.setblocking(False)
        self._connections: dict[_Connection, None] = {}  # an ordered set
        self._pending: dict[_Connection, None] = {}  # with unfinished handshakes; ordered
        self._parked: ParkedRequests[_Connection] = ParkedRequests()
        self._changed_keys: deque[str] = deque()  # other threads append, which is atomic
        self._accept_again = math.inf  # when the listener is polled again
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker_in, selectors.EVENT_READ)
        self.store.watch(self._key_changed)
        self._thread = threading.Thread(target=self._serve, name="horovod-store", daemon=True)
        self._thread.start()
        _servers.add(self)

    def __repr__(self) -> str:
        return f"StoreServer({self.address}:{self.port})"

    def close(self) -> None:
        """Stop serving and close every connection. Does nothing in a forked child."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        self._wake()
        self._thread.join()

    # Called from any thread

    def _key_changed(self, key: str) -> None:
        """Let the server's thread answer the requests that wait for a key."""
        if threading.current_thread() is self._thread:
            self._release(key)
        elif not self._closing:
            self._changed_keys.append(key)
            self._wake()

    def _wake(self) -> None:
        """Wake the server's thread."""
        try:
            self._waker_out.send(b"\0")
        except OSError:
            pass  # full: the thread wakes anyway; closed: there is no thread left to wake

    # Everything below runs in the server's thread

    def _serve(self) -> None:
        """Serve all connections until `close`."""
        try:
            while not self._closing:
                for ready, events in self._selector.select(self._next_deadline()):
                    self._handle(ready.fileobj, ready.data, events)
                while self._changed_keys:
                    self._release(self._changed_keys.popleft())
                self._expire(time.monotonic())
        finally:
            self._close_descriptors()

    def _handle(self, fileobj: Any, connection: _Connection | None, events: int) -> None:
        """Do what a descriptor that is ready asks for."""
        if connection is not None:
            try:
                if connection.is_open and events & selectors.EVENT_WRITE:
                    self._send(connection)
                if connection.is_open and events & selectors.EVENT_READ:
                    self._receive(connection)
            except Exception as error:  # one peer's trouble must never end the service
                get_logger(__name__).exception("store: failed to serve %s", connection.peer)
                self._reject(connection, repr(error))
        elif fileobj is self._listener:
            self._accept()
        else:
            try:
                self._waker_in.recv(4096)
            except BlockingIOError:
                pass

    def _close_descriptors(self) -> None:
        """Close all descriptors. A forked child calls this too, so it does nothing else."""
        self._selector.close()
        for sock in (self._listener, self._waker_in, self._waker_out):
            sock.close()
        for connection in self._connections:
            connection.socket.close()

    def _next_deadline(self) -> float | None:
        """Return the seconds until `_expire` has something to do; None for never."""
        first = min(self._accept_again, self._parked.next_deadline)
        for connection in self._pending:  # oldest first, all with the same time allowed
            first = min(first, connection.handshake_deadline)
            break
        return None if first == math.inf else max(first - time.monotonic(), 0.0)

    def _expire(self, now: float) -> None:
        """Do what is due by now: accept again, answer `get`s without a value, drop strangers."""
        if now >= self._accept_again:
            self._accept_again = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in self._parked.take_expired(now):
            self._reply(connection, {"found": False})
        for connection in list(
            itertools.takewhile(lambda pending: pending.handshake_deadline <= now, self._pending)
        ):
            self._reject(connection, "no complete handshake in time")

    def _accept(self) -> None:
        """Accept all connections that are waiting."""
        while True:
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                if self._pending:  # the oldest peer that has not proved itself makes room
                    self._reject(next(iter(self._pending)), "out of descriptors")
                    continue
                get_logger(__name__).warning("the store cannot accept connections: %s", error)
                self._selector.unregister(self._listener)
                self._accept_again = time.monotonic() + _ACCEPT_PAUSE
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection = _Connection(
                sock,
                f"{peer[0]}:{peer[1]}",
                Session(self._key, server=True),
                time.monotonic() + self._handshake_timeout,
            )
            self._connections[connection] = None
            self._pending[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, connection)
            if len(self._pending) > self._max_pending:
                self._reject(next(iter(self._pending)), "too many unfinished handshakes")

    def _receive(self, connection: _Connection) -> None:
        """Take what has arrived, and answer the requests in it."""
        try:
            data = connection.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(connection, str(error))
            return
        session = connection.session
        if not data:
            if not session.between_frames:
                self.rejected += 1
            self._drop(connection, "closed by the peer")
            return
        try:
            messages = session.feed(data)
        except (WireError, PermissionError) as error:
            self._queue(connection, session.take_output())
            self._reject(connection, str(error))
            return
        self._queue(connection, session.take_output())
        if session.established:
            self._pending.pop(connection, None)
        for message in messages:
            if connection.is_open:
                self._answer(connection, message)

    def _answer(self, connection: _Connection, message: Message) -> None:
        """Do what a request asks for, and answer it now or once its key has a value."""
        header = message.header
        operation, key = header.get("op"), header.get("key")
        if not isinstance(key, str):
            self._reject(connection, "a request without a key")
        elif operation == "set":
            self.store.set(key, message.body)
            self._reply(connection, {})
        elif operation == "get":
            self._answer_get(connection, [key, *header.get("others", ())], header.get("timeout"))
        elif operation == "try_get":
            value = self.store.try_get(key)
            self._reply(connection, {"found": value is not None}, value or b"")
        elif operation == "add" and isinstance(header.get("amount"), int):
            try:
                self._reply(connection, {"total": self.store.add(key, header["amount"])})
            except ValueError as error:
                self._reply(connection, {"error": str(error)})
        elif operation == "delete":
            self._reply(connection, {"found": self.store.delete(key)})
        elif operation == "keys":
            self._reply(connection, {"keys": self.store.keys(key)})
        else:
            self._reject(connection, f"an unknown request {operation!r}")

    def _answer_get(self, connection: _Connection, keys: list[str], timeout: Any) -> None:
        """Send the value of the first key that has one, now or when somebody has set one."""
        for key in keys:
            value = self.store.try_get(key)
            if value is not None:
                self._reply(connection, {"found": True, "key": key}, value)
                return
        if isinstance(timeout, (int, float)) and timeout > 0:
            self._parked.park(connection, keys, time.monotonic() + timeout)
        else:
            self._reply(connection, {"found": False})

    def _release(self, key: str) -> None:
        """Answer the requests that wait for a key, if it has a value."""
        value = self.store.try_get(key)
        if value is not None:
            for connection in self._parked.take(key):
                self._reply(connection, {"found": True, "key": key}, value)

    def _reply(self, connection: _Connection, header: dict[str, Any], body: bytes = b"") -> None:
        """Send an answer."""
        if not connection.is_open:
            return
        try:
            frame = connection.session.seal(header, body)
        except ValueError as error:  # larger than a frame may be
            frame = connection.session.seal({"error": str(error)})
        self._queue(connection, frame)

    def _queue(self, connection: _Connection, data: bytes) -> None:
        """Send bytes after those that are queued already."""
        if data:
            connection.output.append(memoryview(data))
            self._send(connection)

    def _send(self, connection: _Connection) -> None:
        """Send what the kernel takes of the queued bytes."""
        output = connection.output
        try:
            while output:
                sent = connection.socket.send(output[0])
                if sent == len(output[0]):
                    output.popleft()
                else:
                    output[0] = output[0][sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(connection, str(error))
            return
        # A peer that does not take its answers is not read either, so it cannot fill our memory.
        events = selectors.EVENT_WRITE if output else selectors.EVENT_READ
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _reject(self, connection: _Connection, reason: str) -> None:
        """Drop a peer that does not belong to the job, and count it."""
        if not connection.is_open:
            return
        self.rejected += 1
        if self.rejected >= self._next_warning:  # a flood of them must not flood the log
            self._next_warning *= 10
            get_logger(__name__).warning(
                "the job's store at %s:%d refused a connection from %s: %s (%d so far)",
                self.address,
                self.port,
                connection.peer,
                reason,
                self.rejected,
            )
        self._drop(connection, reason)

    def _drop(self, connection: _Connection, reason: str) -> None:
        """Close a connection and forget its requests."""
        if not connection.is_open:
            return
        connection.is_open = False
        get_logger(__name__).debug("store: dropped %s: %s", connection.peer, reason)
        self._pending.pop(connection, None)
        self._connections.pop(connection, None)
        self._parked.drop(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # The child has no serving thread. Its copies of the descriptors would keep the port and the
    # peers' connections alive after the parent's death, so that nobody would notice it.
    for server in list(_servers):
        server._close_descriptors()


os.register_at_fork(after_in_child=_after_fork_in_child)
