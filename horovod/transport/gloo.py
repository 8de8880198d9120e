"""Collectives over TCP, on torch's Gloo process group. Called by the transport selection.

The group is built directly, never with `init_process_group`: the default group is the user's. Only
Gloo's sends and receives are used, with the collectives of `pairwise` on top, because its own
reductions lack data types, round half precision after every operand and have a time limit that
cannot be lifted after connecting. Connecting is limited by HOROVOD_GLOO_TIMEOUT_SECONDS;
afterwards a rank may wait for the others for hours (rank 0 writes a checkpoint).

When a connection breaks, somebody has died, aborted or closed. Who and why comes, in this order,
from what was posted in the store (`failures`), from which connections are dead and which processes
of this host are, and from the address in Gloo's message. Then our own connections are shut down
(`connections`), so that the news reaches everybody whoever they wait for: a thread watches all
connections, because a collective waits for one peer at a time.
"""

from __future__ import annotations

import ctypes
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed

from horovod.common.addresses import interface_address
from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.transport.base import Group
from horovod.transport.connections import (
    Connection,
    Endpoint,
    Watch,
    drain,
    is_dead,
    shut_down,
    tcp_connections,
)
from horovod.transport.failures import FailureBoard, again
from horovod.transport.pairwise import PairwiseTransport, cut
from horovod.transport.places import Place, choose_address
from horovod.transport.store_adapter import TorchStore
from horovod.transport.waiting import Waiter

_gloo: Any = torch.distributed.ProcessGroupGloo  # its type stub lacks most of what it has

_FOREVER = timedelta(days=3650)
_LEAVE_SECONDS = 1.0  # how long a closing rank lets the others finish what they read from it
_TAG = 0  # messages between two ranks are in order, so one tag does for all
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:%]+)\]:(\d+)")


class GlooTransport(PairwiseTransport):
    """The transport of ranks that reach each other over TCP."""

    name = "GLOO"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.on_failure: Callable[[HorovodInternalError], object] | None = None  # from any thread
        self._board = FailureBoard(group)
        self._waiter = Waiter()
        self._failure: HorovodInternalError | None = None
        self._closed = False
        self._calls = threading.Lock()  # held during a collective
        self._stopping = threading.Lock()
        self._process_group: Any = None
        self._listener: Connection | None = None
        self._connections: list[Connection] = []
        self._links: dict[int, socket.socket] = {}  # rank -> our duplicate of its connection
        self._watch: Watch | None = None
        self._places: list[Place] = []
        self._endpoints: dict[Endpoint, int] = {}  # of the peers' ends of our connections
        self._patience = timedelta(seconds=group.config.gloo_timeout_seconds)
        try:
            self._connect()
        except (RuntimeError, OSError, ValueError) as error:
            self._close_now()
            raise HorovodInternalError(
                f"{group.describe(self.rank)} could not connect to the other ranks over Gloo "
                f"(HOROVOD_GLOO_TIMEOUT_SECONDS={group.config.gloo_timeout_seconds:g}): {error}. "
                f"If hosts cannot reach each other on the chosen address, set HOROVOD_GLOO_IFACE "
                f"to the network interface to use"
            ) from error
        self._patience = _FOREVER

    # -- connecting ------------------------------------------------------------------------

    def _connect(self) -> None:
        self._places = self._meet()
        device, self._listener = self._listen()
        options = _gloo._Options()
        options._devices = [device]
        options._timeout = self._patience
        options._threads = 1  # unused: sends and receives run on the device's own thread
        self._store = TorchStore(self.group.store, self.group.config.gloo_timeout_seconds)
        self._waiter.run(lambda: self._build(options), meanwhile=self.group.check_meeting)
        self._find_connections()

    def _build(self, options: Any) -> None:
        self._process_group = _gloo(self._store, self.rank, self.size, options)

    def _meet(self) -> list[Place]:
        """Where every rank runs. Rank 0 collects, so that the store is asked once per rank."""
        store, seconds = self.group.store, self.group.config.gloo_timeout_seconds
        mine = Place.here()
        store.set(f"place/{self.rank}", json.dumps(mine.to_json()).encode())
        if self.rank == 0:
            found = [json.loads(store.get(f"place/{r}", seconds)) for r in range(self.size)]
            store.set("places", json.dumps(found).encode())
        else:
            found = json.loads(store.get("places", 2 * seconds))
        return [Place.from_json(fields) for fields in found]

    def _listen(self) -> tuple[Any, Connection]:
        """A Gloo device, and its listening socket."""
        interface = self.group.config.gloo_iface
        if interface:
            address = interface_address(interface)
        else:
            address = choose_address(self._places[self.rank], self._places)
        for _ in range(5):
            before = {each.inode for each in tcp_connections()}
            device = _gloo.create_device(hostname=address, lazy_init=False)
            found = [c for c in tcp_connections() if c.remote is None and c.inode not in before]
            if len(found) == 1:
                found[0].prepare()
                return device, found[0]
            # Another thread began to listen in this very moment: which one is ours? Again.
        raise OSError("cannot tell Gloo's listening socket from those of other threads")

    def _find_connections(self) -> None:
        """Recognise the sockets of the group among those of the process, peer by peer."""
        assert self._listener is not None
        listeners = [_endpoint(text) for text in self._tell_all(json.dumps(self._listener.local))]
        mine = tcp_connections()
        dialled = {
            rank: connection
            for rank, listener in enumerate(listeners)
            for connection in mine
            if rank != self.rank and connection.remote == listener
        }
        accepted = {
            connection.remote: connection
            for connection in mine
            if connection.remote is not None and connection.local == self._listener.local
        }
        # A peer may leave as soon as it has heard from us, and Gloo then closes its descriptor.
        links = {each.inode: each.open() for each in [*dialled.values(), *accepted.values()]}
        ends = {rank: connection.local for rank, connection in dialled.items()}
        everyones = [json.loads(text) for text in self._tell_all(json.dumps(ends))]
        for rank in self._peers:
            if rank in dialled:
                connection = dialled[rank]
            else:
                theirs = everyones[rank][str(self.rank)]
                connection = accepted[(theirs[0], theirs[1])]
            link = links.pop(connection.inode, None)
            if link is None or connection.remote is None:
                raise OSError(f"{self.group.describe(rank)} closed its connection at once")
            connection.prepare()
            self._connections.append(connection)
            self._links[rank] = link
            self._endpoints[connection.remote] = rank
        for stranger in links.values():
            if stranger is not None:
                stranger.close()
        self._watch = Watch(self._links, self._on_dead)

    def _tell_all(self, text: str) -> list[str]:
        """Every rank's text, over the new connections."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        counts = [int(c) for c in self._exchange(torch.tensor([mine.numel()]))]
        output = torch.empty(sum(counts), dtype=torch.uint8)
        slices = cut(output, counts)
        slices[self.rank].copy_(mine)
        self._gather_slices(slices)
        return [bytes(each.tolist()).decode() for each in slices]

    # -- messages --------------------------------------------------------------------------

    def _send(self, data: torch.Tensor, rank: int) -> Any:
        return self._process_group.send([data], rank, _TAG)

    def _receive(self, data: torch.Tensor, rank: int) -> Any:
        return self._process_group.recv([data], rank, _TAG)

    def _finish(self, pending: list[Any]) -> None:
        def wait() -> None:
            for work in pending:
                work.wait(self._patience)

        connecting = self._patience is not _FOREVER
        self._waiter.run(wait, meanwhile=self.group.check_meeting if connecting else None)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        with self._calls:
            if self._failure is not None:
                raise again(self._failure)
            try:
                yield
            except BaseException as error:
                failure = self._stop(self._explain(error))
                if isinstance(error, Exception):
                    raise again(failure) from error
                raise

    # -- failure ---------------------------------------------------------------------------

    def _explain(self, error: BaseException) -> HorovodInternalError:
        if self._failure is not None:
            return self._failure
        me = self.group.describe(self.rank)
        if not isinstance(error, RuntimeError) or not any(
            is_dead(link) for link in self._links.values()
        ):
            return HorovodInternalError(
                f"{me} failed in a collective: {type(error).__name__}: {error}"
            )
        posted = self._board.look()
        return posted if posted is not None else self._lost(str(error))

    def _on_dead(self, rank: int) -> None:
        """The other end of a connection closed, whether or not anybody here waits for it."""
        if self._failure is None and not self._board.said_goodbye(rank):
            self._stop(self._board.look() or self._lost())

    def _lost(self, message: str = "") -> PeerLostError:
        """Nobody said why: find out whose end of the connection is gone."""
        broken = [rank for rank, link in self._links.items() if is_dead(link)]
        named = _ADDRESS.search(message)
        first = self._endpoints.get((named[1], int(named[2]))) if named else None
        dead = [rank for rank in broken if self._has_died(rank)]
        served = [r for r in broken if self.group.global_ranks[r] == 0]
        if dead:
            lost = dead
        elif self._board.unreachable and served:
            lost = served  # it serves the store, which is gone with it
        else:
            lost = broken[:1] if first is None else [first]
        return PeerLostError("; ".join(self._obituary(rank) for rank in sorted(lost)), sorted(lost))

    def _has_died(self, rank: int) -> bool:
        """Whether it ran where we see processes, and does not any more."""
        place = self._places[rank]
        if place.pids != self._places[self.rank].pids:
            return False
        try:
            return bool(psutil.Process(place.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return True

    def _obituary(self, rank: int) -> str:
        place = self._places[rank]
        who = f"{self.group.describe(rank)} (pid {place.pid} on {place.host})"
        if self._board.said_goodbye(rank):
            return f"{who} has shut down Horovod"
        return f"{who} has died or was cut off: its connection is closed"

    def _stop(self, failure: HorovodInternalError) -> HorovodInternalError:
        """Break the transport for everybody; returns the reason, which may be an earlier one."""
        with self._stopping:
            if self._failure is not None:
                return self._failure
            self._failure = failure
        self._board.post(failure)
        for link in self._links.values():
            shut_down(link)
        self._waiter.give_up()
        if self.on_failure is not None:
            self.on_failure(failure)
        return failure

    def abort(self, reason: str) -> None:
        self._stop(HorovodInternalError(reason))

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._calls.acquire(blocking=False):
            self._stop(HorovodInternalError("Horovod was shut down during a collective"))
            self._calls.acquire()
        try:
            if self._failure is None:
                self._failure = HorovodInternalError("Horovod has been shut down")
                self._board.say_goodbye()
            self._close_now()
        finally:
            self._calls.release()

    def _close_now(self) -> None:
        """Let go of the group; what is on its way to the others still arrives."""
        if self._watch is not None:
            self._watch.close()
        self._waiter.close()
        for link in self._links.values():
            shut_down(link, socket.SHUT_WR)
        self._process_group = None  # closes Gloo's descriptors and ends its threads
        drain(self._links.values(), _LEAVE_SECONDS)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def after_fork_in_child(self) -> None:
        for connection in [*self._connections, *([self._listener] if self._listener else [])]:
            connection.drop_in_child()
        for link in self._links.values():
            link.close()
        self._closed = True
        self._failure = HorovodInternalError("a forked child takes no part in collectives")
        # Its destructor would wait for threads that the child does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._process_group))


def _endpoint(text: str) -> Endpoint:
    address, port = json.loads(text)
    return address, port
