"""TCP connections between the ranks of a group. Used by the TCP transport.

Each rank listens on one address, and connects to a peer when it first needs it: the rank with the
higher number dials. Both sides prove with a key of the job (`wire`) that they belong to the group
before either takes a byte of data. One thread accepts connections, and watches the open ones: a
collective waits for some of its peers and would not see that another is gone.

After a failure connections are shut down, which wakes whoever waits for one here, and then reset
rather than closed: data that has not been read yet would hold up the news. The kernel does the
same for a process that dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from horovod.common.addresses import interface_address
from horovod.common.exceptions import HorovodInternalError
from horovod.common.host import own_networks
from horovod.common.wire import Session
from horovod.transport.base import Group
from horovod.transport.endpoints import RankLocation, choose_address

LOOK_SECONDS = 0.2  # between looks whether the ranks will all come, while they connect
_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = 0.05  # until a dropped handshake is tried again
_PENDING = 64  # connections in the middle of the handshake, besides one for each rank
_GO = b"\x01"  # the dialler's first byte of data: it has taken the last byte of the handshake
_LONGEST_HELLO = 4096
_RESET, _FINISH = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)  # what closing a socket does

# Of the kernel's struct tcp_info: retransmissions, probes, milliseconds since something was
# acknowledged.
_TCP_INFO = struct.Struct("=2xBB52xI")

# Where the system cannot tell (no POLLRDHUP), only a failed connection counts.
_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Links:
    """One rank's connections.

    `on_end(rank, error)` is called when a peer has closed its end, or with a TimeoutError when it
    is cut off.
    """

    def __init__(self, group: Group, on_end: Callable[[int, OSError | None], None]) -> None:
        self.hosts: list[RankLocation] = []
        self.open: dict[int, socket.socket] = {}
        self._group = group
        self._on_end = on_end
        self._key = group.store.derive_key("links")
        self._seconds = group.config.gloo_timeout_seconds
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._ended = False
        self._broken = False
        self._resetting = False
        self._closed = False
        self._arriving: dict[int, _Arrival] = {}  # by descriptor
        self._silent: set[int] = set()  # ranks that are cut off
        self.hosts = self._meet()
        self._listener = self._listen()
        self._waker, self._wakes = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="hvd-links", daemon=True)
        self._thread.start()
        group.store.set(f"port/{group.rank}", json.dumps(self._listener.getsockname()[:2]).encode())

    # -- meeting ---------------------------------------------------------------------------

    def _meet(self) -> list[RankLocation]:
        """Where every rank runs, and, if that is not one network stack, in which networks."""
        found = [
            RankLocation.from_json(each)
            for each in self._exchange("place", dataclasses.asdict(RankLocation.here()))
        ]
        if len({info.network for info in found}) > 1:
            networks = self._exchange("networks", own_networks())
            found = [
                dataclasses.replace(info, networks=tuple(theirs))
                for info, theirs in zip(found, networks, strict=True)
            ]
        return found

    def _exchange(self, key: str, mine: Any) -> list[Any]:
        """Everybody's. Rank 0 collects, so that the store is asked once per rank."""
        group, store = self._group, self._group.store
        store.set(f"{key}/{group.rank}", json.dumps(mine).encode())
        if group.rank == 0:
            found = [json.loads(store.get(f"{key}/{r}", self._seconds)) for r in range(group.size)]
            store.set(f"{key}/all", json.dumps(found).encode())
            return found
        result: list[Any] = json.loads(store.get(f"{key}/all", 2 * self._seconds))
        return result

    def _listen(self) -> socket.socket:
        interface = self._group.config.gloo_iface
        if interface:
            address = interface_address(interface)
        else:
            address = choose_address(self.hosts[self._group.rank], self.hosts)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        listener.setblocking(False)
        return listener

    # -- connecting ------------------------------------------------------------------------

    def to(self, rank: int) -> socket.socket:
        """The connection to a rank; opened now if there is none, however long the peer takes."""
        link = self.open.get(rank)
        if link is None:
            self.connect([rank], None)
            link = self.open[rank]
        return link

    def connect(self, ranks: list[int], seconds: float | None) -> None:
        """Open the connections to all `ranks`, within `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        wanted = [rank for rank in ranks if rank not in self.open]
        for rank in wanted:
            if rank < self._group.rank:
                self._dial(rank, deadline)
        for rank in wanted:
            if rank > self._group.rank:
                self._await(rank, deadline)

    def _dial(self, rank: int, deadline: float | None) -> None:
        if deadline is None:
            deadline = time.monotonic() + self._seconds
        while True:
            try:
                self._add(rank, self._greet(rank, deadline))
                return
            except ConnectionResetError:
                # Among many strangers a listener drops the oldest handshakes: ours may be one.
                with self._changed:
                    if self._ended or time.monotonic() + _RETRY_SECONDS > deadline:
                        raise
                    self._changed.wait(_RETRY_SECONDS)

    def _greet(self, rank: int, deadline: float) -> socket.socket:
        """A connection to the rank, which knows who we are."""
        seconds = max(0.001, deadline - time.monotonic())
        address, port = json.loads(self._group.store.get(f"port/{rank}", seconds))
        link = socket.create_connection((address, port), timeout=seconds)
        try:
            session = Session(self._key, server=False, max_frame=_LONGEST_HELLO)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeted = False
            while True:
                link.sendall(session.take_output())
                if session.established and not greeted:
                    greeted = True
                    link.sendall(session.seal({"rank": self._group.rank}))
                if session.feed(self._answer(rank, link, deadline)):  # we are known there
                    break
            link.sendall(_GO)
            link.settimeout(None)
        except BaseException:
            link.close()
            raise
        return link

    def _answer(self, rank: int, link: socket.socket, deadline: float) -> bytes:
        """What the rank says next. It may have stopped, and the others gone on without it."""
        link.settimeout(LOOK_SECONDS)
        while True:
            try:
                data = link.recv(_LONGEST_HELLO)
            except TimeoutError:
                if time.monotonic() > deadline:
                    who = self._group.describe(rank)
                    raise TimeoutError(f"{who} does not answer") from None
                self._group.check_meeting()
                continue
            if not data:
                raise ConnectionResetError(f"{self._group.describe(rank)} refused a connection")
            return data

    def _await(self, rank: int, deadline: float | None) -> None:
        with self._changed:
            while rank not in self.open:
                if self._ended:
                    raise ConnectionAbortedError("the transport has failed")
                if deadline is not None and time.monotonic() > deadline:
                    who = self._group.describe(rank)
                    raise TimeoutError(f"{who} has not connected")
                if not self._changed.wait(LOOK_SECONDS) and deadline is not None:
                    self._group.check_meeting()

    def _add(self, rank: int, link: socket.socket) -> None:
        self._prepare(link)
        with self._changed:
            if self._ended or rank in self.open:
                link.close()
                raise ConnectionAbortedError("the transport has failed")
            self.open[rank] = link
            self._changed.notify_all()
        self._wake()

    def _prepare(self, link: socket.socket) -> None:
        """Let the kernel ask peers that we send nothing to whether they are still there.

        A peer that is merely busy, or stopped, answers: its kernel does. `_watch_silence` looks
        after the others. TCP_USER_TIMEOUT would end a connection to a peer that answers, but does
        not read what is sent to it.
        """
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        seconds = max(2, round(self._seconds))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", max(1, seconds // 2)),
            ("TCP_KEEPINTVL", max(1, seconds // 6)),
            ("TCP_KEEPCNT", 3),
        ):
            if hasattr(socket, option):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        watched: dict[int, int] = {}  # descriptor -> rank
        known: set[int] = set()  # ranks whose connection is or was watched
        since: dict[int, float] = {}  # when ranks were found not to answer
        while not self._closed:
            if self._resetting:
                for descriptor in watched:
                    poll.unregister(descriptor)
                watched.clear()
                for link in self.open.values():
                    link.close()
                self._resetting = False
            for rank, link in list(self.open.items()):
                if rank not in known:
                    known.add(rank)
                    if link.fileno() >= 0:  # else reset before anybody watched it
                        watched[link.fileno()] = rank
                        poll.register(link, _CLOSED)
            for descriptor, _ in poll.poll(self._patience(bool(watched))):
                if descriptor == self._wakes.fileno():
                    self._wakes.recv(4096)
                elif descriptor == self._listener.fileno():
                    self._accept(poll)
                elif descriptor in self._arriving:
                    self._advance(self._arriving[descriptor], poll)
                elif descriptor in watched:
                    poll.unregister(descriptor)
                    self._on_end(watched.pop(descriptor), None)
            self._drop_late(poll)
            for rank in watched.values():
                self._watch_silence(rank, since)

    def _patience(self, connected: bool) -> float | None:
        """Milliseconds until the thread has something to look after."""
        if self._arriving:
            return 1000 * LOOK_SECONDS
        return 1000 * self._seconds / 8 if connected else None

    def _watch_silence(self, rank: int, since: dict[int, float]) -> None:
        """Notice within the configured time that a peer's kernel does not answer any more."""
        now = time.monotonic()
        waited = _unanswered(self.open[rank])
        if waited is None or rank in self._silent or self._broken:
            since.pop(rank, None)
        elif min(waited, now - since.setdefault(rank, now)) >= self._seconds:
            self._silent.add(rank)
            self._on_end(rank, TimeoutError(f"no answer for {self._seconds:g} s"))

    def _accept(self, poll: select.poll) -> None:
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            session = Session(self._key, server=True, max_frame=_LONGEST_HELLO)
            diallers = range(self._group.rank + 1, self._group.size)
            self._arriving[link.fileno()] = _Arrival(link, session, diallers)
            poll.register(link, select.POLLIN)
            if len(self._arriving) > _PENDING + self._group.size:
                self._drop(next(iter(self._arriving.values())), poll)

    def _advance(self, arrival: _Arrival, poll: select.poll) -> None:
        """Take what a connecting peer has sent; strangers are dropped without a word."""
        try:
            done = arrival.advance()
        except (OSError, ValueError):
            self._drop(arrival, poll)
            return
        if done:
            del self._arriving[arrival.link.fileno()]
            poll.unregister(arrival.link)
            arrival.link.setblocking(True)
            with contextlib.suppress(OSError):
                self._add(arrival.rank, arrival.link)

    def _drop_late(self, poll: select.poll) -> None:
        now = time.monotonic()
        for arrival in list(self._arriving.values()):
            if now > arrival.deadline:
                self._drop(arrival, poll)

    def _drop(self, arrival: _Arrival, poll: select.poll) -> None:
        del self._arriving[arrival.link.fileno()]
        poll.unregister(arrival.link)
        arrival.link.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    # -- the end ---------------------------------------------------------------------------

    def is_dead(self, rank: int) -> bool:
        """Whether the peer has closed its end or is cut off, or the connection has failed."""
        link = self.open.get(rank)
        if link is None or link.fileno() < 0:
            return False
        if rank in self._silent:
            return True
        poll = select.poll()
        poll.register(link, _CLOSED)
        return bool(poll.poll(0))

    def shut_down(self) -> None:
        """End all connections; whoever waits for one wakes up. Any thread may call."""
        with self._changed:
            self._ended = self._broken = True
            self._changed.notify_all()
            links = list(self.open.values())
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """When nobody uses the connections of a broken group any more: tell the peers at once.

        The thread that broke the group may not have come to `shut_down` yet.
        """
        self._ended = self._broken = self._resetting = True
        self._wake()  # the kernel keeps a socket while the thread waits for it

    def close(self, seconds: float) -> None:
        """Let go. Unless the group is broken, what is on its way arrives, within `seconds`."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for arrival in self._arriving.values():
            arrival.link.close()
        self._listener.close()
        if self._broken:
            for link in self.open.values():
                link.close()
        else:
            for link in self.open.values():
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FINISH)
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_WR)
            drain(list(self.open.values()), seconds)
        self._waker.close()
        self._wakes.close()

    def after_fork_in_child(self) -> None:
        """Close what a forked child inherited: the peers must notice when the parent ends."""
        for each in (self._listener, self._waker, self._wakes, *self.open.values()):
            each.close()
        for arrival in self._arriving.values():
            arrival.link.close()


class _Arrival:
    """A connection that somebody has opened to us, until it is known whose it is."""

    def __init__(self, link: socket.socket, session: Session, diallers: range) -> None:
        self.link = link
        self.deadline = time.monotonic() + _HANDSHAKE_SECONDS
        self.rank = -1
        self._session = session
        self._diallers = diallers  # the ranks that may connect to us

    def advance(self) -> bool:
        """Whether the handshake is over. Raises if the peer is none of ours."""
        if self.rank >= 0:
            return self._expect_go()
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

    def _expect_go(self) -> bool:
        if self.link.recv(1) != _GO:
            raise ConnectionResetError
        return True


def _unanswered(link: socket.socket) -> float | None:
    """Seconds since the peer's kernel answered, while ours has to repeat or to ask something."""
    if not hasattr(socket, "TCP_INFO") or link.fileno() < 0:
        return None
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    repeated, asked, milliseconds = _TCP_INFO.unpack(info)
    return milliseconds / 1000 if repeated or asked else None


def drain(sockets: list[socket.socket], seconds: float) -> None:
    """Read and drop what arrives until every peer has closed too, or time is up; then close.

    A socket closed with unread data resets the connection, and with it what the peer has not
    read yet. So a rank that leaves first reads on until the others have what they need.
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


def failed_to_connect(group: Group, error: Exception) -> HorovodInternalError:
    return HorovodInternalError(
        f"{group.describe(group.rank)} could not connect to the other ranks over TCP "
        f"(HOROVOD_GLOO_TIMEOUT_SECONDS={group.config.gloo_timeout_seconds:g}): {error}. "
        f"If hosts cannot reach each other on the chosen address, set HOROVOD_GLOO_IFACE "
        f"to the network interface to use"
    )
