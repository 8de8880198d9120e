"""Which address a rank listens on, decided from what the ranks say about their hosts."""

from __future__ import annotations

import dataclasses
import os
import socket

import pytest

from horovod.common.joining.addresses import LOOPBACK
from horovod.transport.endpoints import RankLocation, choose_address


def place(host: str, *networks: str) -> RankLocation:
    return RankLocation(host=host, network=host, pids=host, pid=1, networks=networks)


def test_one_network_stack_uses_loopback() -> None:
    here = place("a", "192.0.2.1/24")
    assert choose_address(here, [here, here]) == LOOPBACK


def test_the_shared_network_wins_over_earlier_ones() -> None:
    mine = place("a", "203.0.113.1/24", "192.0.2.1/24")
    others = [place("b", "192.0.2.2/24"), place("c", "198.51.100.1/24", "192.0.2.3/24")]
    assert choose_address(mine, [mine, *others]) == "192.0.2.1"


def test_a_bridge_that_every_host_has_is_no_shared_network() -> None:
    bridge = "203.0.113.1/24"
    mine, other = place("a", bridge, "192.0.2.1/24"), place("b", bridge, "192.0.2.2/24")
    assert choose_address(mine, [mine, other]) == "192.0.2.1"


def test_without_a_shared_network_some_address_is_taken() -> None:
    mine, other = place("a", "192.0.2.1/32"), place("b", "198.51.100.2/32")
    assert choose_address(mine, [mine, other]) not in (LOOPBACK, "198.51.100.2")


def test_a_host_without_address_is_told_what_to_do() -> None:
    mine = place("a")
    with pytest.raises(ValueError, match="other ranks run on b; set HOROVOD_GLOO_IFACE"):
        choose_address(mine, [mine, place("b")])


def test_description_of_this_host_survives_the_store() -> None:
    here = RankLocation.here()
    assert (here.host, here.pid) == (socket.gethostname(), os.getpid())
    assert RankLocation.from_json(dataclasses.asdict(here)) == here
