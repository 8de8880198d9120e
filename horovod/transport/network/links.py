"""TCP connections between the ranks of a group. Used by the TCP transport.

Each rank listens on one address, and connects to a peer when it first needs that peer: the rank
with the higher number dials, and both prove who they are (`connections`). One thread accepts
connections, and watches the open ones: a collective waits for some of its peers and would not see
that another is gone.

After a failure connections are first shut down, which wakes the threads of this process that wait
for one, and then reset rather than closed: data that has not been read yet would hold up the news.
The kernel does the same for a process that dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from horovod.common.exceptions import HorovodInternalError
from horovod.common.host import own_networks
from horovod.common.joining.addresses import interface_address
from horovod.transport.base import Group
from horovod.transport.endpoints import RankLocation, choose_address
from horovod.transport.network.connections import (
    CLOSED,
    LOOK_SECONDS,
    Arrival,
    dial,
    drain,
    finish_sending,
    is_ended,
    prepare,
    unanswered_seconds,
)

_RETRY_SECONDS = 0.05  # until a dropped handshake is tried again
_PENDING = 64  # connections in the middle of the handshake, besides one for each rank


class MissingPeerError(TimeoutError):
    """A peer could not be reached, or did not come, while the ranks connected."""

    def __init__(self, rank: int, why: object) -> None:
        super().__init__(str(why))
        self.rank = rank


class Links:
    """One rank's connections to its peers.

    Args:
        group: The ranks.
        on_end: A function that is called from any thread when a connection has ended, with the rank
            and an error: None if the rank has closed its end, a TimeoutError if it is cut off.
    """

    def __init__(self, group: Group, on_end: Callable[[int, OSError | None], None]) -> None:
        self.open: dict[int, socket.socket] = {}  # connections by rank
        self._group = group
        self._on_end = on_end
        self._key = group.store.derive_key("links")
        self._seconds = group.config.gloo_timeout_seconds
        self._changed = threading.Condition()
        # Flags that several threads set without a lock, which is safe because they only go from
        # False to True. The thread of this object alone takes `_is_resetting` back.
        self._has_ended = False  # no new connections
        self._is_broken = False  # connections are reset, not closed
        self._is_resetting = False  # asks the thread to reset them
        self._is_closed = False  # ends the thread
        self._arrivals: dict[int, Arrival] = {}  # by descriptor
        self._silent_ranks: set[int] = set()  # their kernels do not answer any more
        self.locations = self._exchange_locations()
        self._listener = self._listen()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="hvd-links", daemon=True)
        self._thread.start()
        group.store.set(f"port/{group.rank}", json.dumps(self._listener.getsockname()[:2]).encode())

    # -- rendezvous ------------------------------------------------------------------------

    def _exchange_locations(self) -> list[RankLocation]:
        """Return where every rank runs; with its networks if ranks are on several hosts."""
        locations = [
            RankLocation.from_json(each)
            for each in self._exchange("location", dataclasses.asdict(RankLocation.here()))
        ]
        if len({location.network for location in locations}) > 1:
            networks = self._exchange("networks", own_networks())
            locations = [
                dataclasses.replace(location, networks=tuple(theirs))
                for location, theirs in zip(locations, networks, strict=True)
            ]
        return locations

    def _exchange(self, key: str, mine: Any) -> list[Any]:
        """Return every rank's `mine`. Rank 0 collects: then each rank asks the store once."""
        group, store = self._group, self._group.store

        def take(name: str, rank: int, seconds: float) -> Any:
            try:
                return json.loads(store.get(f"{key}/{name}", seconds))
            except TimeoutError as error:
                raise MissingPeerError(rank, error) from error

        store.set(f"{key}/{group.rank}", json.dumps(mine).encode())
        if group.rank == 0:
            values = [take(str(rank), rank, self._seconds) for rank in range(group.size)]
            store.set(f"{key}/all", json.dumps(values).encode())
            return values
        result: list[Any] = take("all", 0, 2 * self._seconds)
        return result

    def _listen(self) -> socket.socket:
        """Open the socket to which higher ranks connect."""
        interface = self._group.config.gloo_iface
        if interface:
            address = interface_address(interface)
        else:
            address = choose_address(self.locations[self._group.rank], self.locations)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        listener.setblocking(False)
        return listener

    # -- connecting ------------------------------------------------------------------------

    def to(self, rank: int) -> socket.socket:
        """Return the connection to a rank; open it first if there is none.

        The peer may take any time to connect: it does so when it reaches the same collective.
        """
        link = self.open.get(rank)
        if link is None:
            self.connect([rank], None)
            link = self.open[rank]
        return link

    def connect(self, ranks: list[int], seconds: float | None) -> None:
        """Open the connections to all `ranks`.

        Args:
            ranks: The peers.
            seconds: The longest wait. With None, a peer that dials us may take any time, and one
                that we dial must answer within HOROVOD_GLOO_TIMEOUT_SECONDS.

        Raises:
            MissingPeerError: A peer cannot be reached, or does not answer in time.
            OSError: The group has failed meanwhile.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        missing = [rank for rank in ranks if rank not in self.open]
        # First dial, then wait: lower ranks accept in their threads whatever they wait for, so no
        # two ranks wait for each other.
        for rank in missing:
            if rank < self._group.rank:
                try:
                    self._dial(rank, deadline)
                except (TimeoutError, ConnectionRefusedError) as error:
                    who = self._group.describe(rank)
                    raise MissingPeerError(rank, f"{who} cannot be reached: {error}") from error
        for rank in missing:
            if rank > self._group.rank:
                self._await(rank, deadline)

    def _dial(self, rank: int, deadline: float | None) -> None:
        """Connect to a lower rank."""
        if deadline is None:
            deadline = time.monotonic() + self._seconds
        while True:
            try:
                self._add(rank, dial(self._group, self._key, rank, deadline))
                return
            except ConnectionResetError:
                # Among many strangers a listener drops the oldest handshakes: ours may be one.
                with self._changed:
                    if self._has_ended or time.monotonic() + _RETRY_SECONDS > deadline:
                        raise
                    self._changed.wait(_RETRY_SECONDS)

    def _await(self, rank: int, deadline: float | None) -> None:
        """Wait until a higher rank has connected to us."""
        with self._changed:
            while rank not in self.open:
                if self._has_ended:
                    raise ConnectionAbortedError("the transport has failed")
                if deadline is not None and time.monotonic() > deadline:
                    who = self._group.describe(rank)
                    raise MissingPeerError(rank, f"{who} has not connected")
                if not self._changed.wait(LOOK_SECONDS) and deadline is not None:
                    self._group.check_rendezvous()

    def _add(self, rank: int, link: socket.socket) -> None:
        """Keep a connection whose handshake is over, and let the thread watch it."""
        prepare(link, self._seconds)
        with self._changed:
            if self._has_ended or rank in self.open:
                link.close()
                raise ConnectionAbortedError("the transport has failed")
            self.open[rank] = link
            self._changed.notify_all()
        self._wake()

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        """Accept connections and watch the open ones until `close`."""
        poll = select.poll()
        poll.register(self._wake_receiver, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        watched: dict[int, int] = {}  # descriptor -> rank
        known: set[int] = set()  # ranks whose connection is or was watched
        silent_since: dict[int, float] = {}  # rank -> when it was first seen not to answer
        while not self._is_closed:
            if self._is_resetting:
                # Here, because the kernel keeps a closed socket up while this thread polls it.
                for descriptor in watched:
                    poll.unregister(descriptor)
                watched.clear()
                for link in self.open.values():
                    link.close()
                self._is_resetting = False
            for rank, link in list(self.open.items()):
                if rank not in known:
                    known.add(rank)
                    if link.fileno() >= 0:  # it may have been reset before it was watched
                        watched[link.fileno()] = rank
                        poll.register(link, CLOSED)
            for descriptor, _ in poll.poll(self._poll_milliseconds(bool(watched))):
                if descriptor == self._wake_receiver.fileno():
                    self._wake_receiver.recv(4096)
                elif descriptor == self._listener.fileno():
                    self._accept(poll)
                elif descriptor in self._arrivals:
                    self._advance(self._arrivals[descriptor], poll)
                elif descriptor in watched:
                    poll.unregister(descriptor)
                    self._on_end(watched.pop(descriptor), None)
            self._drop_late(poll)
            for rank in watched.values():
                self._watch_silence(rank, silent_since)

    def _poll_milliseconds(self, is_connected: bool) -> float | None:
        """Return after how many milliseconds deadlines must be looked at, if there are any."""
        if self._arrivals:
            return 1000 * LOOK_SECONDS
        return 1000 * self._seconds / 8 if is_connected else None

    def _watch_silence(self, rank: int, silent_since: dict[int, float]) -> None:
        """Notice within the configured time that a peer's kernel does not answer any more.

        Two clocks must agree, the kernel's and ours. The kernel's counts from the last answer,
        which may be long ago when nothing was sent in between.
        """
        now = time.monotonic()
        waited = unanswered_seconds(self.open[rank])
        if waited is None or rank in self._silent_ranks or self._is_broken:
            silent_since.pop(rank, None)
        elif min(waited, now - silent_since.setdefault(rank, now)) >= self._seconds:
            self._silent_ranks.add(rank)
            self._on_end(rank, TimeoutError(f"no answer for {self._seconds:g} s"))

    def _accept(self, poll: select.poll) -> None:
        """Begin the handshake with somebody who connects; drop the oldest of too many."""
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            diallers = range(self._group.rank + 1, self._group.size)
            self._arrivals[link.fileno()] = Arrival(link, self._key, diallers)
            poll.register(link, select.POLLIN)
            if len(self._arrivals) > _PENDING + self._group.size:
                self._drop(next(iter(self._arrivals.values())), poll)

    def _advance(self, arrival: Arrival, poll: select.poll) -> None:
        """Go on with a handshake. A stranger is dropped without an answer."""
        try:
            is_done = arrival.advance()
        except (OSError, ValueError):
            self._drop(arrival, poll)
            return
        if is_done:
            del self._arrivals[arrival.link.fileno()]
            poll.unregister(arrival.link)
            arrival.link.setblocking(True)
            with contextlib.suppress(OSError):
                self._add(arrival.rank, arrival.link)

    def _drop_late(self, poll: select.poll) -> None:
        """Drop connections whose handshake takes too long."""
        now = time.monotonic()
        for arrival in list(self._arrivals.values()):
            if now > arrival.deadline:
                self._drop(arrival, poll)

    def _drop(self, arrival: Arrival, poll: select.poll) -> None:
        """Close a connection in the middle of its handshake."""
        del self._arrivals[arrival.link.fileno()]
        poll.unregister(arrival.link)
        arrival.link.close()

    def _wake(self) -> None:
        """Let the thread look again at what it watches."""
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"x")

    # -- the end ---------------------------------------------------------------------------

    def is_dead(self, rank: int) -> bool:
        """Return whether the peer has closed its end or is cut off, or the connection failed."""
        link = self.open.get(rank)
        if link is None or link.fileno() < 0:
            return False
        return rank in self._silent_ranks or is_ended(link)

    def shut_down(self) -> None:
        """End all connections, and so wake the threads that wait for one. Any thread may call."""
        with self._changed:
            self._has_ended = self._is_broken = True
            self._changed.notify_all()
            links = list(self.open.values())
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Reset the connections of a broken group, so that the peers know at once.

        Called when no thread uses the connections any more. The thread that broke the group may
        not have come to `shut_down` yet, so the flags are set here too.
        """
        self._has_ended = self._is_broken = self._is_resetting = True
        self._wake()  # the kernel keeps a socket up while the thread polls it

    def close(self, seconds: float) -> None:
        """Close everything.

        Args:
            seconds: The longest wait, unless the group is broken, until the peers have received
                everything that was sent.
        """
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._is_closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for arrival in self._arrivals.values():
            arrival.link.close()
        self._listener.close()
        if self._is_broken:
            for link in self.open.values():
                link.close()
        else:
            for link in self.open.values():
                with contextlib.suppress(OSError):
                    finish_sending(link)
            drain(list(self.open.values()), seconds)
        self._wake_sender.close()
        self._wake_receiver.close()

    def after_fork_in_child(self) -> None:
        """Close what a forked child inherited: the peers must notice when the parent ends."""
        for each in (self._listener, self._wake_sender, self._wake_receiver, *self.open.values()):
            each.close()
        for arrival in self._arrivals.values():
            arrival.link.close()


def connection_failure(group: Group, error: Exception) -> HorovodInternalError:
    """Return the error that a rank raises when it could not connect to its peers."""
    missing = [error.rank] if isinstance(error, MissingPeerError) else []
    return HorovodInternalError(
        f"{group.describe(group.rank)} could not connect to the other ranks over TCP "
        f"(HOROVOD_GLOO_TIMEOUT_SECONDS={group.config.gloo_timeout_seconds:g}): {error}. "
        f"If hosts cannot reach each other on the chosen address, set HOROVOD_GLOO_IFACE "
        f"to the network interface to use",
        ranks=missing,
    )
