"""The host list and the plan of slots."""

from __future__ import annotations

import socket

import pytest

from horovod.runner.hosts import Host, Slot, is_local, parse_hosts, plan_slots


def test_hosts_with_and_without_slots():
    assert parse_hosts("localhost:2, node-1.example:4,b") == [
        Host("localhost", 2),
        Host("node-1.example", 4),
        Host("b"),
    ]


@pytest.mark.parametrize("text", ["", "a:", "a:x", "a:-1", "a b:1", "::1:2", "a:1,,b:1", "$(x):1"])
def test_wrong_items_are_named(text: str):
    with pytest.raises(ValueError, match="not of the form"):
        parse_hosts(text)


def test_a_host_without_slots_and_a_host_named_twice_are_refused():
    with pytest.raises(ValueError, match="'a:0' offers no slots"):
        parse_hosts("a:0")
    with pytest.raises(ValueError, match="'a' is named twice"):
        parse_hosts("a:1,b:1,a:2")


def test_local_names():
    assert is_local("localhost")
    assert is_local(socket.gethostname())
    assert not is_local("some-other-host.example")


def test_one_host():
    assert plan_slots([Host("localhost")], 2) == [
        Slot("localhost", 0, 2, 0, 2, 0, 1),
        Slot("localhost", 1, 2, 1, 2, 0, 1),
    ]


def test_hosts_are_filled_in_order_and_no_further_than_needed():
    plan = plan_slots([Host("a", 3), Host("b", 1), Host("c", 3)], 6)
    where = [(slot.hostname, slot.local_rank, slot.local_size) for slot in plan]
    assert where == [("a", 0, 3), ("a", 1, 3), ("a", 2, 3), ("b", 0, 1), ("c", 0, 2), ("c", 1, 2)]
    assert [(slot.cross_rank, slot.cross_size) for slot in plan] == [
        (0, 3),
        (0, 2),
        (0, 1),
        (1, 3),
        (2, 3),
        (1, 2),
    ]
    assert [slot.rank for slot in plan] == list(range(6))


def test_too_few_slots():
    with pytest.raises(ValueError, match="offer 3 slots, but 4 processes"):
        plan_slots([Host("a", 1), Host("b", 2)], 4)
