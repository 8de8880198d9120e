"""Facts about this host."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import subprocess
import sys

import pytest

from horovod.common import host


def test_the_launchers_name_for_a_host_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HOROVOD_HOSTNAME", raising=False)
    assert host.host_name() == socket.gethostname()
    monkeypatch.setenv("HOROVOD_HOSTNAME", "node7")
    assert host.host_name() == "node7"
    assert host.host_identity().startswith("node7/")


def test_another_process_of_this_host_has_the_same_identity():
    program = "from horovod.common.host import host_identity; print(host_identity())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == host.host_identity(), done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/net"), reason="needs Linux")
def test_what_linux_knows_is_part_of_it():
    assert host.boot_id()
    assert host.boot_id() in host.host_identity()
    assert host.namespace("net") in host.host_identity()
    assert host.namespace("net") != host.namespace("pid")


def test_what_is_not_known_is_empty():
    assert host.namespace("nonsense") == ""


def test_networks_are_addresses_with_their_prefix_and_never_loopback():
    for text in host.own_networks():
        network = ipaddress.ip_interface(text)
        assert not network.ip.is_loopback
        assert network.network.prefixlen > 0


def test_the_other_end_of_a_unix_socket_is_this_user():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert host.check_same_user(ours) == os.getpid()


@pytest.mark.parametrize(("uid", "own"), [(1001, 1000), (3_000_000_000, 1000)])
def test_another_user_is_refused(uid: int, own: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: own)
    with pytest.raises(PermissionError, match=f"process 7 of user {uid} wanted to join"):
        host.check_same_user(_SocketOf(7, uid))  # type: ignore[arg-type]


def test_user_ids_may_be_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: 3_000_000_000)
    assert host.check_same_user(_SocketOf(7, 3_000_000_000)) == 7  # type: ignore[arg-type]


class _SocketOf:
    """A socket whose other end is this process, as the kernel says it."""

    def __init__(self, pid: int, uid: int) -> None:
        self._credentials = struct.pack("iII", pid, uid, 0)

    def getsockopt(self, *_: int) -> bytes:
        return self._credentials
