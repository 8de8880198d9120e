"""The store's server and client under load, attack, loss and fork."""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from horovod.common.store import StoreClient, StoreServer
from horovod.common.store import server as store_server
from horovod.common.wire import Session, Stream, new_key

LONG = 200.0
KEY = new_key()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", KEY)
    yield server
    server.close()


def connect(server: StoreServer) -> StoreClient:
    return StoreClient(server.address, server.port, KEY, LONG)


def raw(server: StoreServer) -> socket.socket:
    return socket.create_connection((server.address, server.port), timeout=LONG)


def wait_closed(sock: socket.socket) -> bytes:
    """What the server still sends before it closes the connection."""
    received = b""
    try:
        while data := sock.recv(4096):
            received += data
    except ConnectionResetError:
        pass
    return received


def assert_still_serves(server: StoreServer) -> None:
    client = connect(server)
    client.set("alive", b"yes")
    assert client.get("alive", LONG) == b"yes"
    client.close()


def test_listens_on_the_given_address_only(server: StoreServer) -> None:
    assert server._listener.getsockname() == ("127.0.0.1", server.port)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.port), timeout=LONG)
    with pytest.raises(OSError, match="address"):
        StoreServer("127.0.0.1", KEY, server.port)


def test_ipv6() -> None:
    try:
        server = StoreServer("::1", KEY)
    except OSError:
        pytest.skip("this host has no IPv6")
    assert_still_serves(server)
    server.close()


def test_200_connections_at_once() -> None:
    server = StoreServer("127.0.0.1", KEY)
    server._handshake_timeout = LONG  # of 200 threads in one process
    start = threading.Barrier(200, timeout=LONG)
    clients: list[StoreClient] = []
    failures: list[BaseException] = []

    def rank(index: int) -> None:
        try:
            start.wait()
            client = connect(server)
            clients.append(client)
            client.set(f"rank/{index}", b"%d" % index)
            if client.add("arrived", 1) == 200:
                client.set("all", b"")
            client.get("all", LONG)
            assert client.get(f"rank/{(index + 1) % 200}", LONG) == b"%d" % ((index + 1) % 200)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert failures == []
    assert len(clients) == 200
    assert server.rejected == 0
    server.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95cos\nsystem\n", b"\0" * 100, b"HVDW\x02" + b"x" * 99],
)
def test_garbage_is_refused_counted_and_harmless(server: StoreServer, garbage: bytes) -> None:
    with raw(server) as sock:
        sock.sendall(garbage)
        wait_closed(sock)
    assert server.rejected == 1
    assert_still_serves(server)


def test_wrong_key(server: StoreServer) -> None:
    other = new_key()
    with pytest.raises(PermissionError, match="differ") as caught:
        StoreClient(server.address, server.port, other, LONG)
    assert f"{server.address}:{server.port}" in str(caught.value)
    assert_still_serves(server)


def test_forged_proof(server: StoreServer) -> None:
    with raw(server) as sock:
        sock.sendall(Session(new_key(), server=False).take_output() + bytes(32))
        wait_closed(sock)
    assert server.rejected == 1
    assert_still_serves(server)


def established(server: StoreServer) -> tuple[socket.socket, Session]:
    sock, session = raw(server), Session(KEY, server=False)
    sock.sendall(session.take_output())
    while not session.established:
        session.feed(sock.recv(4096))
    sock.sendall(session.take_output())
    return sock, session


def test_replayed_request_is_refused(server: StoreServer) -> None:
    sock, session = established(server)
    frame = session.seal({"op": "add", "key": "n", "amount": 1})
    sock.sendall(frame)
    assert session.feed(sock.recv(4096))[0].header == {"total": 1}
    sock.sendall(frame)
    assert wait_closed(sock) == b""
    sock.close()
    assert server.store.get("n", LONG) == b"1"
    assert server.rejected == 1
    assert_still_serves(server)


def test_oversized_request_is_refused(server: StoreServer) -> None:
    sock, _ = established(server)
    sock.sendall(struct.pack("!II", 0xFFFFFFFF, 0xFFFFFFFF))
    assert wait_closed(sock) == b""
    sock.close()
    assert server.rejected == 1
    assert_still_serves(server)


def test_cut_request_is_counted(server: StoreServer) -> None:
    sock, session = established(server)
    sock.sendall(session.seal({"op": "set", "key": "k"}, b"value")[:-1])
    sock.shutdown(socket.SHUT_WR)
    wait_closed(sock)
    sock.close()
    assert server.rejected == 1
    assert server.store.keys("") == []


@pytest.mark.parametrize(
    "request_", [{}, {"op": "set"}, {"op": "steal", "key": "k"}, {"op": "add", "key": "k"}]
)
def test_senseless_request_is_refused(server: StoreServer, request_: dict[str, object]) -> None:
    sock, session = established(server)
    sock.sendall(session.seal(request_))
    assert wait_closed(sock) == b""
    sock.close()
    assert server.rejected == 1
    assert_still_serves(server)


def test_slow_handshake_is_ended() -> None:
    server = StoreServer("127.0.0.1", KEY)
    server._handshake_timeout = 0.2
    with raw(server) as slow:
        slow.sendall(b"HVD")
        assert wait_closed(slow) == b""
    assert server.rejected == 1
    server._handshake_timeout = LONG  # ours may be slow as well
    assert_still_serves(server)
    server.close()


def test_slow_handshake_holds_up_nobody(server: StoreServer) -> None:
    with raw(server) as slow:
        slow.sendall(b"HVD")
        assert_still_serves(server)


def test_flood_of_silent_connections_keeps_nobody_out() -> None:
    server = StoreServer("127.0.0.1", KEY)
    server._max_pending = 8
    flood = [raw(server) for _ in range(40)]
    assert_still_serves(server)
    assert server.rejected >= 32
    for sock in flood:
        sock.close()
    server.close()


def test_peer_that_does_not_read_blocks_nobody(server: StoreServer) -> None:
    server.store.set("large", bytes(32 << 20))
    sock, session = established(server)
    for _ in range(4):
        sock.sendall(session.seal({"op": "try_get", "key": "large"}))
    assert_still_serves(server)
    sock.close()
    assert_still_serves(server)


def test_answer_larger_than_a_frame_is_an_error_of_that_request(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "Session", partial(Session, max_frame=1000))
    server.store.set("large", bytes(2000))
    client = connect(server)
    with pytest.raises(ValueError, match="larger than the limit"):
        client.get("large", LONG)
    client.set("small", b"1")
    assert client.get("small", LONG) == b"1"
    client.close()


def test_request_larger_than_a_frame_leaves_the_client_usable(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(server)
    stream = client._stream()
    monkeypatch.setattr(stream._session, "_max_frame", 1000)
    with pytest.raises(ValueError, match="larger than the limit"):
        client.set("k", bytes(2000))
    client.set("k", b"1")
    assert client.get("k", LONG) == b"1"
    client.close()


def test_abandoned_waits_are_forgotten(server: StoreServer) -> None:
    sock, session = established(server)
    for index in range(200):
        sock.sendall(session.seal({"op": "get", "key": f"k{index}", "timeout": 1000.0}))
    sock.sendall(session.seal({"op": "set", "key": "sent"}))
    server.store.get("sent", LONG)
    sock.close()
    other, session = established(server)
    for index in range(200):
        server.store.set(f"k{index}", b"")
    other.sendall(session.seal({"op": "get", "key": "more", "timeout": 1000.0}))
    other.sendall(session.seal({"op": "set", "key": "sent again"}))
    server.store.get("sent again", LONG)
    assert list(server._parked._by_key) == ["more"]
    assert len(server._parked._deadlines) < 100
    other.close()


def test_server_out_of_descriptors_recovers(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    blocked = socket.socket()
    blocked.settimeout(LONG)
    highest = os.open(os.devnull, os.O_RDONLY)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        blocked.connect((server.address, server.port))
        session = Session(KEY, server=False)
        blocked.sendall(session.take_output())
        deadline = time.monotonic() + LONG
        while "cannot accept" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        blocked.settimeout(0.3)
        with pytest.raises(TimeoutError):
            blocked.recv(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    blocked.settimeout(LONG)
    assert blocked.recv(1) == b"H"
    blocked.close()


def test_lost_server_is_named(server: StoreServer) -> None:
    client = connect(server)
    address = f"{server.address}:{server.port}"
    server.close()
    with pytest.raises(ConnectionError, match=address):
        client.set("k", b"")
    with pytest.raises(ConnectionError, match=f"cannot reach.*{address}"):
        client.set("k", b"")
    with pytest.raises(ConnectionError, match=f"cannot reach.*{address}"):
        connect(server)


def test_a_connection_that_broke_while_it_was_idle_is_replaced(server: StoreServer) -> None:
    client = connect(server)
    assert client.add("count", 1) == 1
    client._local.stream._socket.shutdown(socket.SHUT_RDWR)
    assert client.add("count", 1) == 2  # it has not been counted twice


def test_closing_the_server_wakes_waiting_clients(server: StoreServer) -> None:
    client = connect(server)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            client.get("never", LONG)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    server.close()
    thread.join(LONG)
    client.close()
    assert [type(failure) for failure in failures] == [ConnectionError]


def test_closing_the_client_wakes_its_threads(server: StoreServer) -> None:
    client = connect(server)
    failures: list[BaseException] = []
    entered = threading.Event()

    def wait() -> None:
        client.set("entered", b"")
        entered.set()
        try:
            client.get("never", LONG)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait(LONG)
    client.close()
    thread.join(LONG)
    assert [type(failure) for failure in failures] == [ConnectionError]
    with pytest.raises(ConnectionError, match="closed"):
        client.set("k", b"")


def test_server_can_be_closed_twice(server: StoreServer) -> None:
    server.close()
    server.close()
    server.store.set("still", b"there")


def test_nothing_shows_the_key(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="horovod"):
        with raw(server) as sock:
            sock.sendall(b"GET / HTTP/1.1")
            wait_closed(sock)
        with pytest.raises(PermissionError) as caught:
            StoreClient(server.address, server.port, new_key(), LONG)
        client = connect(server)
        shown = repr(server) + repr(client) + repr(client._stream()) + repr(caught.value)
        client.close()
        server.close()
    assert "dropped" in caplog.text
    for text in (shown, caplog.text):
        assert repr(KEY) not in text
        assert KEY.hex() not in text


def test_forked_child_cannot_use_or_harm_the_store(server: StoreServer) -> None:
    client = connect(server)
    client.set("k", b"parent")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        report = b"no error"
        try:
            client.set("k", b"child")
        except RuntimeError as error:
            report = str(error).encode()
        client.close()
        server.close()
        listening = server._listener.fileno() != -1
        os.write(write_end, report + (b" LISTENING" if listening else b""))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        report = pipe.read()
    os.waitpid(pid, 0)
    assert b"forked process" in report
    assert b"LISTENING" not in report
    assert client.get("k", LONG) == b"parent"
    assert_still_serves(server)
    client.close()


def test_parents_death_is_seen_although_a_forked_child_lives(server: StoreServer) -> None:
    keep_read, keep_write = os.pipe()
    told_read, told_write = os.pipe()
    parent = os.fork()
    if parent == 0:
        own = StoreServer("127.0.0.1", KEY)
        if os.fork() == 0:
            os.close(keep_write)
            os.write(told_write, b"%d" % own.port)
            os.read(keep_read, 1)
            os._exit(0)
        os.kill(os.getpid(), 9)
    os.close(told_write)
    port = int(os.read(told_read, 16))
    os.waitpid(parent, 0)
    with pytest.raises(ConnectionRefusedError):
        Stream.connect("127.0.0.1", port, KEY, LONG)
    for descriptor in (keep_read, keep_write, told_read):
        os.close(descriptor)
