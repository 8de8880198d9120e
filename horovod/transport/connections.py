"""Hold on the TCP connections that a communication engine opened inside this process.

Gloo keeps its sockets to itself and offers no way to wake a thread that waits for a live peer. But
they are descriptors of this process: found in its descriptor table and recognised by their end
points (our listening port, the listening ports of the peers), they can be watched, shut down
(which wakes the waiting thread here and at the peer), drained on the way out, and dropped in a
forked child.

A descriptor that the engine closed in the meantime may by now be another file. So we work on
duplicates (called links): what they are cannot change under us, and the connection lasts as long
as ours does. The engine's own descriptor is told by its inode. Called by the Gloo transport.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

Endpoint = tuple[str, int]  # address, port

_KEEPALIVE_IDLE = 30  # seconds of silence before the kernel asks whether the peer's host is there
_KEEPALIVE_INTERVAL = 10
_KEEPALIVE_PROBES = 3

# Where the system cannot tell (no POLLRDHUP), only a failed connection counts.
_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


@dataclass(frozen=True)
class Connection:
    """A TCP socket of this process; `remote` is None for one that listens."""

    descriptor: int
    inode: int
    local: Endpoint
    remote: Endpoint | None

    def open(self) -> socket.socket | None:
        """A duplicate to work with; None when the engine has closed it."""
        found = _duplicate(self.descriptor)
        if found is None or os.fstat(found.fileno()).st_ino == self.inode:
            return found
        found.close()
        return None

    def prepare(self) -> None:
        """Keep it from started programs, and notice the loss of the peer's host or network."""
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFD)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
        found = self.open() if self.remote is not None else None
        if found is None:
            return
        with found, contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                ("TCP_KEEPIDLE", _KEEPALIVE_IDLE),
                ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL),
                ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
                (
                    "TCP_USER_TIMEOUT",
                    1000 * (_KEEPALIVE_IDLE + _KEEPALIVE_INTERVAL * _KEEPALIVE_PROBES),
                ),
            ):
                if hasattr(socket, option):
                    found.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def drop_in_child(self) -> None:
        """Put /dev/null in its place in a forked child.

        The number stays taken, so that the engine's own close in the child hits nothing else.
        """
        with contextlib.suppress(OSError):
            if os.fstat(self.descriptor).st_ino == self.inode:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, self.descriptor, inheritable=False)
                os.close(null)


def tcp_connections() -> list[Connection]:
    """All TCP sockets of this process that listen or are connected."""
    directory = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = []
    for name in os.listdir(directory):
        connection = _describe(int(name)) if name.isdigit() else None
        if connection is not None:
            found.append(connection)
    return found


def is_dead(link: socket.socket) -> bool:
    """Whether the peer has closed its end, or the connection has failed."""
    poll = select.poll()
    poll.register(link, _CLOSED)
    return bool(poll.poll(0))


def shut_down(link: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End the connection here and at the peer; whoever waits for it wakes up."""
    with contextlib.suppress(OSError):
        link.shutdown(how)


class Watch:
    """Calls `on_dead(rank)` as soon as the connection to that rank is closed from the other side.

    A collective waits for one peer at a time and would not see that another one is gone. The
    watching thread sleeps in the kernel otherwise.
    """

    def __init__(self, links: Mapping[int, socket.socket], on_dead: Callable[[int], None]) -> None:
        self._on_dead = on_dead
        self._ranks = {link.fileno(): rank for rank, link in links.items()}
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="hvd-connections", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stopped, select.POLLIN)
        for descriptor in self._ranks:
            poll.register(descriptor, _CLOSED)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._stopped.fileno():
                    return
                poll.unregister(descriptor)
                self._on_dead(self._ranks[descriptor])

    def close(self) -> None:
        self._stop.close()
        self._thread.join()
        self._stopped.close()


def drain(sockets: Iterable[socket.socket], seconds: float) -> None:
    """Read and drop what arrives until every peer has closed too, or time is up; then close.

    A socket closed with unread data resets the connection, and with it what the peer has not
    read yet. So a rank that leaves first reads on until the others have what they need.
    """
    deadline = time.monotonic() + seconds
    waiting = {each.fileno(): each for each in sockets}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting:
        left = deadline - time.monotonic()
        ready = poll.poll(max(left, 0) * 1000)
        if not ready:
            break
        for descriptor, _ in ready:
            try:
                data = waiting[descriptor].recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                poll.unregister(descriptor)
                waiting.pop(descriptor).close()
    for each in waiting.values():
        each.close()


def _describe(descriptor: int) -> Connection | None:
    found = _duplicate(descriptor)
    if found is None:
        return None
    with found:
        try:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if found.type != socket.SOCK_STREAM:
                return None
            listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            remote = None if listens else _endpoint(found.getpeername())
            inode = os.fstat(found.fileno()).st_ino
            return Connection(descriptor, inode, _endpoint(found.getsockname()), remote)
        except OSError:  # bound but not connected
            return None


def _duplicate(descriptor: int) -> socket.socket | None:
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        if stat.S_ISSOCK(os.fstat(copy).st_mode):
            return socket.socket(fileno=copy)
    except OSError:
        pass
    os.close(copy)
    return None


def _endpoint(name: tuple[str, int]) -> Endpoint:
    return name[0], name[1]
