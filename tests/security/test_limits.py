"""What strangers can use up of a job's store, and what people can read about the job."""

from __future__ import annotations

import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from horovod.common.logging import get_logger
from horovod.common.store import StoreClient, StoreServer
from horovod.common.wire import MAX_FRAME, Session, encode_key, new_key
from tests.runner.horovodrun import HANG, run

KEY = new_key()

SILENT = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", KEY)
    yield server
    server.close()


def refused(server: StoreServer, number: int) -> None:
    for _ in range(number):
        with socket.create_connection((server.address, server.port), HANG) as sock:
            sock.sendall(b"anything else")
            try:
                sock.recv(1)
            except ConnectionError:
                pass


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_refusals_are_counted_and_told_without_flooding_the_log(server: StoreServer):
    logger, collector = get_logger(), Collector()
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.DEBUG)
    try:
        refused(server, 120)
        server.close()
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
    assert server.rejected == 120
    warnings = [r.getMessage() for r in collector.records if r.levelno == logging.WARNING]
    assert [text.rpartition("(")[2] for text in warnings] == [f"{n} so far)" for n in (1, 10, 100)]
    assert f"{server.address}:{server.port} refused a connection from 127.0.0.1:" in warnings[0]
    assert "does not speak Horovod's protocol" in warnings[0]
    drops = [r for r in collector.records if r.getMessage().startswith("store: dropped")]
    assert len(drops) == 120


def test_silent_connections_leave_descriptors_for_the_launcher(server: StoreServer):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert server._max_pending <= max(8, soft // 4)


def test_whoever_holds_all_descriptors_makes_room_for_the_ranks():
    server = StoreServer("127.0.0.1", KEY)
    server._max_pending = 10_000
    rank, session = socket.socket(), Session(KEY, server=False)
    rank.settimeout(HANG)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stranger = subprocess.Popen(
        [sys.executable, "-c", SILENT, str(server.port), "60"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    highest = os.open(os.devnull, os.O_RDONLY)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"holding\n"
        rank.connect((server.address, server.port))
        rank.sendall(session.take_output())
        while not session.established:
            data = rank.recv(4096)
            assert data, "the rank was refused"
            session.feed(data)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stranger.communicate(timeout=HANG)
        rank.close()
        server.close()
    assert server.rejected >= 40


def test_a_stranger_makes_the_store_keep_next_to_nothing(server: StoreServer):
    """Without the key nothing is kept beyond the few bytes of a handshake."""
    hello = Session(bytes(32), server=False).take_output()
    with socket.create_connection((server.address, server.port), HANG) as sock:
        sock.sendall(hello)
        sock.recv(4096)
        sock.sendall(bytes(31))
        client = StoreClient(server.address, server.port, KEY, HANG)
        client.set("seen", b"")
        client.close()
        assert all(len(each.session._input) <= 31 for each in list(server._connections))
    assert MAX_FRAME <= 1 << 28


@pytest.mark.parametrize("options", [[], ["-H", "alpha:1,beta:1"]])
def test_a_dry_run_shows_no_key(options: list[str]):
    """Not even one that somebody has in the environment already."""
    key = encode_key(KEY)
    env = {"_HOROVOD_SECRET_KEY": key}
    done = run("-np", "2", *options, "--dry-run", "--verbose", "true", env=env)
    assert done.returncode == 0, done.stderr
    assert "_HOROVOD_SECRET_KEY" in done.stdout
    assert key not in done.stdout + done.stderr
