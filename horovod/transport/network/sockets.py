"""What the TCP connections of a group ask of the kernel. Used by `links`."""

from __future__ import annotations

import select
import socket
import struct
import time

# What SO_LINGER says about closing a socket: reset the connection, or finish what was sent.
_RESET, _FINISH = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)

# Three fields of the kernel's struct tcp_info: retransmissions, probes, and milliseconds since the
# peer last acknowledged something.
_TCP_INFO = struct.Struct("=2xBB52xI")

# Where the system has no POLLRDHUP, a peer that has closed its end is not seen; a failed
# connection is.
CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


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
