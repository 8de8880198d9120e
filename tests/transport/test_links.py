"""Connections between ranks: opened when needed, only to ranks of the group, and how they end."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import queue
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from horovod.common.config import Config
from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.common.store import MemoryStore, Store
from horovod.common.wire import Session, Stream, new_key
from horovod.transport.base import Group
from horovod.transport.network import connections, links
from horovod.transport.network.connections import drain
from horovod.transport.network.links import Links, MissingPeerError
from horovod.transport.network.tcp import TcpTransport
from tests.ranks import start_ranks, tell
from tests.transport.kinds import connect, whole_group

SECONDS = 120.0  # until something counts as hanging
CONFIG = Config(gloo_timeout_seconds=SECONDS)
GO = b"\x01"


class Ranks:
    """The links of all ranks of a group, in this process."""

    def __init__(self, size: int, config: Config = CONFIG) -> None:
        self.store: Store = MemoryStore()
        self.ended: list[queue.Queue[int]] = [queue.Queue() for _ in range(size)]

        def make(me: int) -> Links:
            group = Group(me, size, tuple(range(size)), self.store, config)
            return Links(group, lambda rank, _: self.ended[me].put(rank))

        self.links = together([lambda rank=rank: make(rank) for rank in range(size)])

    def address(self, rank: int) -> tuple[str, int]:
        host, port = json.loads(self.store.get(f"port/{rank}", SECONDS))
        return host, port

    def join(self, low: int, high: int) -> tuple[socket.socket, socket.socket]:
        """Open the connection between two ranks."""
        both = together([lambda: self.links[low].to(high), lambda: self.links[high].to(low)])
        return both[0], both[1]

    def expect_answers_within(self, seconds: float) -> None:
        """Of the connections that are open, which may take longer to come about."""
        for each in self.links:
            each._seconds = seconds
            each._wake()

    def check(self, low: int = 0, high: int = 1) -> None:
        """The group works."""
        near, far = self.join(low, high)
        near.sendall(b"ping")
        assert far.recv(4, socket.MSG_WAITALL) == b"ping"
        far.sendall(b"pong")
        assert near.recv(4, socket.MSG_WAITALL) == b"pong"


def together(functions: list[Callable[[], Any]]) -> list[Any]:
    """What they return, each called in a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(f) for f in functions]]


@contextmanager
def linked(size: int, config: Config = CONFIG) -> Iterator[Ranks]:
    ranks = Ranks(size, config)
    try:
        yield ranks
    finally:
        for each in ranks.links:
            each.shut_down()
        for each in ranks.links:
            each.close(0)


@contextmanager
def transports(size: int) -> Iterator[list[TcpTransport]]:
    store = MemoryStore()

    def make(rank: int) -> TcpTransport:
        return TcpTransport(Group(rank, size, tuple(range(size)), store, CONFIG))

    made = together([lambda rank=rank: make(rank) for rank in range(size)])
    try:
        yield made
    finally:
        together([transport.close for transport in made])


# -- when needed ---------------------------------------------------------------------------------


def test_nobody_connects_before_it_is_needed():
    with linked(3) as ranks:
        assert not any(each.open for each in ranks.links)
        ranks.check(0, 2)
        assert [sorted(each.open) for each in ranks.links] == [[2], [], [0]]
        assert ranks.links[0].to(2) is ranks.links[0].open[2], "one connection is enough"


@pytest.mark.parametrize("size", [9, 12])
def test_many_ranks_connect_to_few(size: int):
    with transports(size) as group:
        most = 2 * (size - 1).bit_length()
        for transport in group:
            assert len(transport._links.open) <= most
        tensors = [torch.full((200_000,), float(rank)) for rank in range(size)]
        together(
            [
                lambda t=transport, x=tensor: t.allreduce(x, ReduceOp.SUM)
                for transport, tensor in zip(group, tensors, strict=True)
            ]
        )
        assert all((tensor == sum(range(size))).all() for tensor in tensors)
        together([transport.barrier for transport in group])
        for transport in group:
            assert len(transport._links.open) <= most


def test_more_connections_come_with_the_first_use():
    size = 12
    with transports(size) as group:
        before = [set(transport._links.open) for transport in group]
        outputs = [torch.empty(size, dtype=torch.int64) for _ in group]
        ones = [1] * size
        together(
            [
                lambda t=transport, x=output: t.alltoall(torch.arange(size), x, ones, ones)
                for transport, output in zip(group, outputs, strict=True)
            ]
        )
        for rank, (transport, output) in enumerate(zip(group, outputs, strict=True)):
            assert output.tolist() == [rank] * size
            assert before[rank] < set(transport._links.open)


def test_a_rank_that_hangs_while_it_connects_is_named():
    store, meet = MemoryStore(), TcpTransport._meet
    groups = [Group(rank, 2, (0, 1), store, CONFIG) for rank in range(2)]

    def hang() -> Links:
        """Connect, and then do nothing more: the thread of the links goes on."""
        hanging = Links(groups[1], lambda *_: None)
        hanging.connect([0], SECONDS)
        return hanging

    def start() -> None:
        with pytest.raises(HorovodInternalError, match="rank 1 has begun to connect") as caught:
            TcpTransport(groups[0])
        assert list(caught.value.ranks) == [1]

    with mock.patch.object(TcpTransport, "_meet", lambda self, _: meet(self, 0.2)):
        hanging, _ = together([hang, start])
    hanging.close(1.0)


def test_a_rank_that_does_not_come_is_named():
    message = "rank 1 has not connected"
    with linked(2) as ranks, pytest.raises(MissingPeerError, match=message) as caught:
        ranks.links[0].connect([1], 0.05)
    assert caught.value.rank == 1


def test_waiting_for_a_connection_ends_when_the_group_breaks():
    with linked(2) as ranks, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks.links[0].to, 1)
        ranks.links[0].shut_down()
        with pytest.raises(ConnectionAbortedError):
            waiting.result(SECONDS)


# -- strangers -----------------------------------------------------------------------------------


def is_dropped(stranger: socket.socket) -> bool:
    """Wait for the end of a connection; False if something else happens."""
    stranger.settimeout(SECONDS)
    try:
        while stranger.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


class Bomb:
    """What unpickling it would do, can be seen."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def nonsense(path: Path) -> dict[str, bytes]:
    hello = Session(new_key(), server=False).take_output()
    return {
        "noise": os.urandom(100_000),
        "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "a pickle": pickle.dumps(Bomb(path)),
        "another version": hello[:4] + bytes([hello[4] + 1]) + hello[5:],
        "no proof": hello + bytes(32),
        "noise for a proof": hello + os.urandom(5000),
    }


@pytest.mark.parametrize("what", nonsense(Path()))
def test_a_stranger_that_talks_nonsense_is_dropped(what: str, tmp_path: Path):
    path = tmp_path / "unpickled"
    with linked(2) as ranks:
        for rank in range(2):
            with socket.create_connection(ranks.address(rank)) as stranger:
                stranger.sendall(nonsense(path)[what])
                assert is_dropped(stranger)
        ranks.check()
        assert [list(each.open) for each in ranks.links] == [[1], [0]]
    assert not path.exists()


def test_a_stranger_with_another_key_learns_and_gets_nothing():
    with linked(2) as ranks:
        address, port = ranks.address(0)
        with pytest.raises(PermissionError):
            Stream.connect(address, port, new_key(), SECONDS)
        # One that does not care that our proof is wrong.
        with socket.create_connection((address, port)) as stranger:
            session = Session(new_key(), server=False)
            stranger.sendall(session.take_output())
            assert len(stranger.recv(4096)) < 100
            stranger.sendall(bytes(32) + session._nonce)
            assert is_dropped(stranger)
        ranks.check()


def test_a_stranger_that_comes_and_goes_is_forgotten():
    with linked(2) as ranks:
        for _ in range(50):
            socket.create_connection(ranks.address(0)).close()
        ranks.check()


def test_a_silent_stranger_is_dropped_in_time():
    with linked(2) as ranks:
        with mock.patch.object(connections, "_HANDSHAKE_SECONDS", 0.1):  # too short for slow ranks
            with socket.create_connection(ranks.address(0)) as stranger:
                assert is_dropped(stranger)
            with socket.create_connection(ranks.address(0)) as stranger:
                stranger.sendall(b"HV")
                assert is_dropped(stranger)
        ranks.check()


def test_many_silent_strangers_keep_nobody_out():
    with mock.patch.object(links, "_PENDING", 4), linked(3) as ranks:
        strangers = [socket.create_connection(ranks.address(0)) for _ in range(30)]
        for stranger in strangers[:-7]:  # there is room for one of each rank besides
            assert is_dropped(stranger)
        ranks.check(0, 1)
        ranks.check(0, 2)
        for stranger in strangers:
            stranger.close()


def test_a_rank_dropped_in_a_crowd_of_strangers_tries_again():
    with mock.patch.object(links, "_PENDING", -1), linked(2) as ranks:
        # There is room for one, the last that comes.
        crowd: list[socket.socket] = []
        entered = ranks.links[0]._accept
        dropped: list[int] = []

        def accept(poll: Any) -> None:
            """The first time a rank comes, a stranger comes right after it."""
            entered(poll)
            if not dropped:
                dropped.append(1)
                crowd.append(socket.create_connection(ranks.address(0)))
                entered(poll)
                crowd.pop().close()

        with mock.patch.object(ranks.links[0], "_accept", accept):
            ranks.check()
        assert dropped


@pytest.mark.parametrize(
    "header",
    [{"rank": r} for r in (0, -1, -3, 3, 1 << 70, "1e", "two", None, [1], {}, 1.5)]
    + [{}, {"r": 1}],
    ids=str,
)
def test_nobody_can_be_an_impossible_rank(header: dict[str, Any]):
    with linked(3) as ranks:
        stranger = introduce(ranks, header)
        assert is_dropped(stranger)
        stranger.close()
        assert not ranks.links[0].open
        ranks.check(0, 1)
        ranks.check(0, 2)


def test_nobody_can_be_a_rank_that_is_there():
    with linked(2) as ranks:
        ranks.check()
        before = ranks.links[0].open[1]
        stranger = introduce(ranks, {"rank": 1})
        assert is_dropped(stranger)
        stranger.close()
        assert ranks.links[0].open == {1: before}
        ranks.check()
        assert ranks.ended[0].empty()


def introduce(ranks: Ranks, header: dict[str, Any]) -> socket.socket:
    """Connect to rank 0 with the right key."""
    key = ranks.store.derive_key("links")
    stream = Stream.connect(*ranks.address(0), key, SECONDS)
    own = socket.socket(fileno=os.dup(stream._socket.fileno()))
    stream.send(header, pickle.dumps("x"), timeout=SECONDS)
    own.settimeout(SECONDS)
    try:
        if own.recv(4096):  # a welcome
            own.sendall(GO)
    except ConnectionError:
        pass
    return own


def listening() -> set[tuple[str, int]]:
    return {
        (each.laddr.ip, each.laddr.port)
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("interface", ["", "lo"])
def test_ranks_of_one_host_listen_on_loopback_only(interface: str):
    before = listening()
    with linked(3, Config(gloo_timeout_seconds=SECONDS, gloo_iface=interface)) as ranks:
        assert listening() - before == {ranks.address(rank) for rank in range(3)}
        assert all(ranks.address(rank)[0] == "127.0.0.1" for rank in range(3))


# -- the end -------------------------------------------------------------------------------------


def fill(link: socket.socket) -> int:
    """Send until the peer, which does not read, takes no more."""
    sent = 0
    while True:
        try:
            sent += link.send(bytes(1 << 16), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return sent


def test_a_reset_is_seen_at_once_behind_megabytes_that_nobody_reads():
    with linked(2) as ranks:
        near, _ = ranks.join(0, 1)
        assert fill(near) > 1 << 16
        ranks.links[0].shut_down()
        ranks.links[0].reset()
        assert ranks.ended[1].get(timeout=SECONDS) == 0
        assert ranks.links[1].is_dead(0)


def test_a_connection_that_is_reset_before_anybody_watches_it():
    closed = socket.socket()
    closed.close()
    with linked(2) as ranks:  # an error in its thread fails the test
        ranks.join(0, 1)
        ranks.links[0].open[7] = closed  # seen when the thread wakes up for the reset
        ranks.links[0].reset()
        assert ranks.ended[1].get(timeout=SECONDS) == 0


def test_closing_after_a_reset_that_came_before_the_shut_down():
    with linked(2) as ranks:
        ranks.join(0, 1)
        ranks.links[0].reset()
        assert ranks.ended[1].get(timeout=SECONDS) == 0  # so the connection is closed by now
        ranks.links[0].close(SECONDS)


def test_a_peer_that_does_not_read_for_long_is_not_lost():
    """As one that is stopped, or whose threads wait for the interpreter's lock."""
    with linked(2) as ranks:
        near, far = ranks.join(0, 1)
        ranks.expect_answers_within(2)
        sent = fill(near)
        with pytest.raises(queue.Empty):
            ranks.ended[0].get(timeout=3.5)
        while sent:
            sent -= len(far.recv(1 << 16))
        ranks.check()


def test_a_peer_is_lost_when_its_kernel_is_silent_for_long_enough():
    """On loopback nothing gets lost, so what the kernel says is made up."""
    silent = threading.Event()

    def unanswered(link: socket.socket) -> float | None:
        return 100.0 if silent.is_set() and link is ranks.links[0].open[2] else None

    with (
        mock.patch.object(links, "unanswered_seconds", unanswered),
        linked(3) as ranks,
    ):
        ranks.check(0, 1)
        ranks.check(0, 2)
        ranks.expect_answers_within(2)
        silent.set()
        assert ranks.ended[0].get(timeout=SECONDS) == 2
        assert ranks.links[0].is_dead(2)
        assert not ranks.links[0].is_dead(1)
        ranks.check(0, 1)


def test_a_peer_that_answers_now_and_then_is_not_lost():
    ages = itertools.cycle([0.1, 1.0, 0.1, 1.9])
    looks: queue.Queue[float] = queue.Queue()

    def unanswered(link: socket.socket) -> float | None:
        looks.put(0)
        return next(ages)

    with (
        mock.patch.object(links, "unanswered_seconds", unanswered),
        linked(2) as ranks,
    ):
        ranks.join(0, 1)
        ranks.expect_answers_within(2)
        for _ in range(24):  # of both, four in a second: more than 2 s
            looks.get(timeout=SECONDS)
        assert ranks.ended[0].empty()


def test_the_end_of_a_peer_is_told_once():
    with linked(3) as ranks:
        ranks.check(0, 1)
        ranks.check(0, 2)
        ranks.links[1].shut_down()
        assert ranks.ended[0].get(timeout=SECONDS) == 1
        assert ranks.links[0].is_dead(1)
        assert not ranks.links[0].is_dead(2)
        ranks.check(0, 2)  # which takes the thread's turn
        assert ranks.ended[0].empty()
        assert ranks.ended[2].empty()


def test_what_was_sent_before_closing_arrives():
    with linked(2) as ranks:
        near, far = ranks.join(0, 1)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        far.sendall(bytes(50_000))  # never read: closing as usual would lose what is on its way
        sent = fill(near)
        closing = threading.Thread(target=ranks.links[0].close, args=(SECONDS,))
        closing.start()
        got = 0
        while data := far.recv(1 << 12):
            got += len(data)
            far.send(b"more")  # that is not read either
        assert got == sent
        ranks.links[1].close(SECONDS)
        closing.join(SECONDS)
        assert not closing.is_alive()


def test_a_peer_that_never_closes_is_not_waited_for_longer():
    near, far = socket.socketpair()
    with far:
        far.sendall(b"more")
        drain([near], 0.05)
        assert near.fileno() < 0
        assert far.recv(1) == b""


def test_draining_takes_sockets_that_are_closed_already():
    near, far = socket.socketpair()
    near.close()
    far.close()
    drain([near], SECONDS)


def test_nothing_is_left_after_closing():
    gc.collect()  # what earlier tests have left must not go meanwhile
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with linked(3) as ranks:
            ranks.check(0, 1)
            ranks.check(1, 2)
            stranger = socket.create_connection(ranks.address(0))
        stranger.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


def _fork(rank: int, size: int) -> int | None:
    ended: queue.Queue[int] = queue.Queue()
    mine = Links(whole_group(rank, size, connect()), lambda peer, _: ended.put(peer))
    mine.to(1 - rank)
    if rank == 0:
        if os.fork() == 0:
            mine.after_fork_in_child()
            tell("forked")
            signal.pause()
        signal.pause()
    tell("in place")
    return ended.get(timeout=SECONDS)


def test_a_forked_child_hides_nothing_from_the_peers():
    with start_ranks(_fork, 2) as ranks:
        assert ranks.heard(0) == "forked"
        assert ranks.heard(1) == "in place"
        ranks.signal(0, signal.SIGKILL)
        (survivor,) = ranks.wait(SECONDS, [1])
        assert survivor.result == 0, survivor.describe()


def test_closing_for_good_resets_what_a_failure_left():
    with linked(2) as ranks:
        near, far = ranks.join(0, 1)
        linger = near.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)
        assert struct.unpack("ii", linger) == (1, 0)
        ranks.links[0].shut_down()
        ranks.links[0].close(0)
        assert ranks.ended[1].get(timeout=SECONDS) == 0
        with pytest.raises(ConnectionError):
            far.send(b"x")
