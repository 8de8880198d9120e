"""Finding, watching and ending TCP connections by their descriptors."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator

import pytest

from horovod.transport.connections import (
    Connection,
    Watch,
    drain,
    is_dead,
    shut_down,
    tcp_connections,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


def found(each: socket.socket) -> Connection:
    (connection,) = [c for c in tcp_connections() if c.descriptor == each.fileno()]
    return connection


def test_connections_are_found_with_their_ends(pair: Pair) -> None:
    near, far = found(pair[0]), found(pair[1])
    assert (near.local, near.remote) == (far.remote, far.local)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert found(server).remote is None


def test_a_reused_descriptor_is_not_touched(pair: Pair) -> None:
    connection = found(pair[0])
    other, peer = socket.socketpair()
    with other, peer:
        os.dup2(other.fileno(), pair[0].fileno())
        assert connection.open() is None
        connection.drop_in_child()
        assert os.fstat(pair[0].fileno()).st_ino == os.fstat(other.fileno()).st_ino


def test_shutting_down_a_duplicate_wakes_both_ends(pair: Pair) -> None:
    link = found(pair[0]).open()
    assert link is not None
    with link:
        assert not is_dead(link)
        shut_down(link)
        assert pair[0].recv(1) == b""
        assert pair[1].recv(1) == b""


def test_dropping_leaves_no_copy_that_keeps_the_connection_open(pair: Pair) -> None:
    found(pair[0]).drop_in_child()
    assert pair[1].recv(1) == b""
    assert os.readlink(f"/proc/self/fd/{pair[0].fileno()}") == os.devnull


def test_watch_tells_which_end_closed_and_lets_go(pair: Pair) -> None:
    dead: queue.Queue[int] = queue.Queue()
    watch = Watch({7: pair[0]}, dead.put)
    pair[1].sendall(b"unread data does not hide the end")
    pair[1].close()
    assert dead.get(timeout=10) == 7
    watch.close()
    assert not watch._thread.is_alive()


def test_drain_reads_until_the_peer_leaves(pair: Pair) -> None:
    pair[1].sendall(b"x" * 100_000)
    pair[1].shutdown(socket.SHUT_WR)
    drain([pair[0]], seconds=10)
    assert pair[0].fileno() == -1
    assert pair[1].recv(1) == b""  # an orderly end: a reset would raise


def test_drain_does_not_wait_for_a_silent_peer(pair: Pair) -> None:
    drain([pair[0]], seconds=0.01)
    assert pair[0].fileno() == -1
