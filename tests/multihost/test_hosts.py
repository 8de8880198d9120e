"""The hosts of these tests are as far apart as the tests need them to be."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from benchmarks.network_hosts import NameSpaces
from tests.hosts import LAUNCHER, Hosts, host_address, host_name, plan
from tests.ranks import listen, tell


def _where(rank: int, size: int) -> tuple[str, str, str, list[str]]:
    names = {name: socket.gethostbyname(name) for name in (host_name(0), host_name(1), "launcher")}
    assert names == {"host0": host_address(0), "host1": host_address(1), "launcher": LAUNCHER}
    with socket.create_server((socket.gethostname(), 0)) as server:
        own = server.getsockname()[0]
    interfaces = sorted(name for _, name in socket.if_nameindex() if name in ("lo", "eth0"))
    return os.environ["HOROVOD_HOSTNAME"], socket.gethostname(), own, interfaces


def test_every_host_has_its_own_name_address_and_interfaces(hosts: Hosts):
    assert hosts.run(_where, [2, 1]) == [
        (host_name(host), host_name(host), host_address(host), ["eth0", "lo"]) for host in (0, 0, 1)
    ]


def test_the_test_process_stays_where_it_is(hosts: Hosts):
    before = os.stat("/proc/self/ns/net").st_ino, socket.gethostname(), os.listdir("/mnt")
    hosts.run(_where, [1, 1])
    assert hosts.reach(0)
    assert before == (
        os.stat("/proc/self/ns/net").st_ino,
        socket.gethostname(),
        os.listdir("/mnt"),
    )


def _abstract_socket(rank: int, size: int, name: str) -> bool:
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen()
            tell("listening")
            listen()  # as the others do
            listen()  # until they have tried
            return True
    listen()
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(name)
        except ConnectionRefusedError:
            return False
        finally:
            tell("tried")
    return True


def test_abstract_sockets_end_at_the_host(hosts: Hosts):
    with hosts.start(_abstract_socket, [2, 1], f"\0hosts-{os.getpid()}") as ranks:
        assert ranks.heard(0) == "listening"
        ranks.say()
        assert [ranks.heard(1), ranks.heard(2)] == ["tried", "tried"]
        ranks.say()
        assert ranks.results() == [True, True, False]


def test_a_cut_host_is_out_of_reach_until_it_is_healed(hosts: Hosts):
    hosts.cut(1)
    try:
        assert not hosts.reach(1, timeout=0.3)
        assert hosts.reach(0)
    finally:
        hosts.heal(1)
    assert hosts.reach(1)


def test_hosts_of_two_runs_do_not_meet(hosts: Hosts):
    with Hosts(1) as others:
        hosts.cut(0)
        try:
            assert others.reach(0)
            assert not hosts.reach(0, timeout=0.3)
        finally:
            hosts.heal(0)


@pytest.mark.parametrize(
    ("in_turn", "expected"),
    [
        (False, [("host0", 0, 0, 2), ("host0", 1, 0, 1), ("host1", 0, 1, 2)]),
        (True, [("host0", 0, 0, 2), ("host1", 0, 1, 2), ("host0", 1, 0, 1)]),
    ],
)
def test_places(in_turn: bool, expected: list[tuple[str, int, int, int]]):
    slots = plan([2, 1], in_turn)
    assert [(s.hostname, s.local_rank, s.cross_rank, s.cross_size) for s in slots] == expected
    assert [s.rank for s in slots] == [0, 1, 2]


def test_a_link_has_the_rate_that_it_is_given(hosts: Hosts):
    if shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        pytest.skip("there is no program tc (iproute2)")

    def shown() -> bytes:
        command = ["tc", "qdisc", "show", "dev", "eth0"]
        path = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
        return hosts.popen(1, command, stdout=subprocess.PIPE, env=path).communicate(timeout=100)[0]

    hosts.limit(1, "1gbit")
    assert b"rate 1Gbit" in shown()
    hosts.limit(1, None)
    assert b"rate" not in shown()


_ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 29400)) as server:
    print("ready", flush=True)
    connection = server.accept()[0]
    while data := connection.recv(1 << 16):
        connection.sendall(data)
"""
_ASK = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 29400)) as connection:
    print(time.monotonic() - began)
    for number in range(8):
        sent = bytes([number]) * 50_000
        connection.sendall(sent)
        assert connection.recv(len(sent), socket.MSG_WAITALL) == sent
"""


def test_links_between_hosts_may_take_their_time(hosts: Hosts):
    with Hosts(2) as pair, closing(NameSpaces(pair)) as network:
        network.limit("100mbit/30ms")
        program = [sys.executable, "-c", _ECHO, host_address(0)]
        server = pair.popen(0, program, stdout=subprocess.PIPE)
        assert server.stdout is not None
        with server, server.stdout:
            assert server.stdout.readline() == b"ready\n"
            program = [sys.executable, "-c", _ASK, host_address(0)]
            with pair.popen(1, program, stdout=subprocess.PIPE) as client:
                seconds = client.communicate(timeout=60)[0]
    assert client.returncode == server.returncode == 0
    assert float(seconds) >= 2 * 0.03  # there and back
