"""How two ranks of a group prove to each other who they are, over a new TCP connection.

Both sides prove with a key of the job (`wire`) that they belong to it. The rank that dials then
says its number, the other welcomes it, and the first byte of data (`_GO`) says that the welcome
has arrived. Neither side takes a byte of data before that. Used by `links`.
"""

from __future__ import annotations

import json
import socket
import time

from horovod.common.wire import Session
from horovod.transport.base import Group

LOOK_SECONDS = 0.2  # between looks whether the ranks will all come, while they connect
_HANDSHAKE_SECONDS = 10.0
_GO = b"\x01"
_LONGEST_HELLO = 4096


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
