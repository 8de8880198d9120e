"""The TCP connections of a group: how two ranks make one, and what is asked of the kernel.

Both sides prove with a key of the job (`wire`) that they belong to it. The rank that dials then
says its number, the other welcomes it, and the first byte of data (`_GO`) says that the welcome
has arrived. Neither side takes a byte of data before that. Used by `links`.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time

from horovod.common.wire import Session
from horovod.transport.base import Group

LOOK_SECONDS = 0.2  # between looks whether the ranks will all come, while they connect
_HANDSHAKE_SECONDS = 10.0
_GO = b"\x01"
_LONGEST_HELLO = 4096

# What SO_LINGER says about closing a socket: reset the connection, or finish what was sent.
_RESET, _FINISH = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)

# Three fields of the kernel's struct tcp_info: retransmissions, probes, and milliseconds since the
# peer last acknowledged something.
_TCP_INFO = struct.Struct("=2xBB52xI")

# Where the system has no POLLRDHUP, a peer that has closed its end is not seen; a failed
# connection is.
CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Arrival:
    """A connection that somebody has opened to us, until the handshake shows whose it is."""

    def __init__(self, link: socket.socket, key: bytes, diallers: range) -> None:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link = link
        self.deadline = time.monotonic() + _HANDSHAKE_SECONDS
        self.rank = -1  # the peer's rank, once it has said so
        self._session = Session(key, server=True, max_frame=_LONGEST_HELLO)
        self._diallers = diallers  # the ranks that may connect to us

    def advance(self) -> bool:
        """Take what the peer has sent, and return whether the handshake is over.

        Raises:
            OSError: The peer does not belong to the group, or has closed the connection.
            ValueError: The peer does not speak our protocol.
        """
        if self.rank >= 0:
            if self.link.recv(1) != _GO:
                raise ConnectionResetError
            return True
        data = self.link.recv(_LONGEST_HELLO)
        if not data:
            raise ConnectionResetError
        messages = self._session.feed(data)
        self.link.sendall(self._session.take_output())
        if messages:
            rank = messages[0].header.get("rank")
            if not isinstance(rank, int) or rank not in self._diallers:
                raise ConnectionRefusedError
            self.rank = rank
            self.link.sendall(self._session.seal({"welcome": True}))
        return False


def dial(group: Group, key: bytes, rank: int, deadline: float) -> socket.socket:
    """Return a connection to `rank`, which knows who we are."""
    seconds = max(0.001, deadline - time.monotonic())
    address, port = json.loads(group.store.get(f"port/{rank}", seconds))
    link = socket.create_connection((address, port), timeout=seconds)
    try:
        session = Session(key, server=False, max_frame=_LONGEST_HELLO)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        has_greeted = False
        while True:
            link.sendall(session.take_output())
            if session.established and not has_greeted:
                has_greeted = True
                link.sendall(session.seal({"rank": group.rank}))
            if session.feed(_receive(group, rank, link, deadline)):  # the peer has welcomed us
                break
        link.sendall(_GO)
        link.settimeout(None)
    except BaseException:
        link.close()
        raise
    return link


def _receive(group: Group, rank: int, link: socket.socket, deadline: float) -> bytes:
    """Return what the rank says next.

    The rank may have stopped, and an elastic job gone on without it: then the store knows.
    """
    link.settimeout(LOOK_SECONDS)
    while True:
        try:
            data = link.recv(_LONGEST_HELLO)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{group.describe(rank)} does not answer") from None
            group.check_rendezvous()
            continue
        if not data:
            raise ConnectionResetError(f"{group.describe(rank)} refused a connection")
        return data


def prepare(link: socket.socket, seconds: float) -> None:
    """Set the options of a new connection, whose peer may be silent for `seconds`.

    The kernel asks peers that we send nothing to whether they are still there. A peer that is
    merely busy, or stopped, answers: its kernel does. `Links` looks after connections on which
    something was sent. TCP_USER_TIMEOUT would end a connection to a peer that answers, but does
    not read what is sent to it.
    """
    # A connection of a broken group is reset, because data that the peer has not read yet would
    # hold up the news. `finish_sending` takes this back for a group that is whole.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    whole_seconds = max(2, round(seconds))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", max(1, whole_seconds // 2)),
        ("TCP_KEEPINTVL", max(1, whole_seconds // 6)),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def unanswered_seconds(link: socket.socket) -> float | None:
    """Return the seconds since the peer's kernel last answered, or None if nothing is unanswered.

    Something is unanswered while our kernel has to repeat data, or to ask whether the peer lives.
    """
    if not hasattr(socket, "TCP_INFO") or link.fileno() < 0:
        return None
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    repeated, asked, milliseconds = _TCP_INFO.unpack(info)
    return milliseconds / 1000 if repeated or asked else None


def is_ended(link: socket.socket) -> bool:
    """Return whether the peer has closed its end, or the connection has failed."""
    poll = select.poll()
    poll.register(link, CLOSED)
    return bool(poll.poll(0))


def finish_sending(link: socket.socket) -> None:
    """Tell the peer that nothing more comes, after everything that was sent has arrived."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FINISH)
    link.shutdown(socket.SHUT_WR)


def drain(sockets: list[socket.socket], seconds: float) -> None:
    """Read and drop what arrives until every peer has closed too, or time is up; then close.

    A socket that is closed with unread data resets the connection, and the peer loses what it has
    not read yet. So a rank that leaves first goes on reading until the others have what they need.
    """
    deadline = time.monotonic() + seconds
    waiting = {each.fileno(): each for each in sockets if each.fileno() >= 0}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting:
        ready = poll.poll(max(deadline - time.monotonic(), 0) * 1000)
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
