"""Facts about this host."""

from __future__ import annotations

import ipaddress
import os
import socket
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
