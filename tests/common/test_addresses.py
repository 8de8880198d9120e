"""Choosing the address that other hosts use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from horovod.common.joining.addresses import (
    interface_address,
    is_local,
    is_loopback,
    resolve,
    routable_address,
)


def own_address() -> str:
    """An IPv4 address of this host other than loopback."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not is_loopback(entry.address):
                return str(entry.address)
    pytest.skip("this host has the loopback interface only")


def test_interface() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("lo,eth7") == "127.0.0.1"
    assert routable_address("lo") == "127.0.0.1", "an explicit interface decides"


def test_unknown_interface_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"HOROVOD_GLOO_IFACE=nope.*\blo\b"):
        interface_address("nope")


def test_resolve() -> None:
    assert resolve("192.0.2.7") == ["192.0.2.7"]
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("no-such-host.invalid") == []
    assert resolve("a" * 300) == []


def test_is_local() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.7")
    assert is_loopback("127.3.2.1")
    assert is_loopback("::1")
    assert not is_loopback("192.0.2.7")
    assert not is_loopback("name")


def test_an_address_of_the_job_that_is_this_host_comes_first() -> None:
    ours = own_address()
    assert routable_address(None, ["", "localhost", ours]) == ours


def test_never_loopback() -> None:
    own_address()
    try:
        assert not is_loopback(routable_address(None, ["127.0.0.1", "localhost"]))
    except ValueError as error:
        pytest.skip(f"this host's name has no address: {error}")


def test_a_host_without_network_is_told_what_to_set() -> None:
    program = (
        "from horovod.common.joining.addresses import *; routable_address(None, ['localhost'])"
    )
    # A network name space of its own, where only loopback exists.
    isolated = ["unshare", "--map-root-user", "--net", "true"]
    if shutil.which("unshare") is None or subprocess.run(isolated, check=False).returncode:
        pytest.skip("network name spaces are not allowed here")
    result = subprocess.run(
        [*isolated[:-1], sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ValueError" in result.stderr
    assert "HOROVOD_GLOO_IFACE" in result.stderr
