"""Host lists in every form, and the plan of slots."""

from __future__ import annotations

import socket
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.common.topology import Slot
from horovod.runner.slots.hosts import Host, is_local, parse_hostfile, parse_hosts, plan_slots


def test_hosts_with_and_without_slots():
    assert parse_hosts("localhost:2, node-1.example:4,b") == [
        Host("localhost", 2),
        Host("node-1.example", 4),
        Host("b"),
    ]


def test_ipv6_in_brackets():
    assert parse_hosts("[::1]:2,[fe80::2%eth0]:4,[2001:db8::7]") == [
        Host("::1", 2),
        Host("fe80::2%eth0", 4),
        Host("2001:db8::7"),
    ]


def test_ranges():
    assert parse_hosts("node[01-04]:2") == [Host(f"node0{n}", 2) for n in (1, 2, 3, 4)]
    assert [host.name for host in parse_hosts("n[1,3-5],m[8-11].example,x")] == [
        *("n1", "n3", "n4", "n5"),
        *("m8.example", "m9.example", "m10.example", "m11.example"),
        "x",
    ]
    assert [host.name for host in parse_hosts("r[1-2]n[08-10]:1")] == [
        *("r1n08", "r1n09", "r1n10"),
        *("r2n08", "r2n09", "r2n10"),
    ]
    assert len(parse_hosts("n[001-256]:8")) == 256


@pytest.mark.parametrize(
    "text",
    [
        *("", "a:", "a:x", "a:-1", "a b:1", "a:1,,b:1", "$(x):1", "-oProxyCommand=x:1"),
        *("a]:1", "a[:1", "a:9999999", "é:1", "a\nb:1", "[1-4]n:2"),
    ],
)
def test_wrong_items_are_named(text: str):
    with pytest.raises(ValueError, match="not of the form"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("::1:2", r"put IPv6 addresses in brackets"),
        ("[::g]:2", r"'\[::g\]' is not an IPv6 address"),
        ("[fe80::1%$(x)]:2", "is not an IPv6 address"),
        ("n[4-1]:2", "'4-1' in 'n.4-1.' runs backwards"),
        ("n[a-b]:2", "'a-b' in 'n.a-b.' is not a number or a range"),
        ("n[]:2", "'' in 'n..' is not a number or a range"),
        ("n[0-999999]:2", "more than 100000 hosts"),
        ("n[1-999][1-999]:2", "more than 100000 hosts"),
        ("a:0", "'a:0' offers no slots"),
        ("a:0,b:0", "'a:0,b:0' offers no slots"),
        ("a:1,b:1,a:2", "'a' is named twice"),
        ("n[1-3]:1,n2:1", "'n2' is named twice"),
    ],
)
def test_mistakes_are_explained(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        parse_hosts(text)


@given(st.text(alphabet="ab1-9[],:.%= \n", max_size=20))
def test_any_text_is_hosts_or_a_value_error(text: str):
    try:
        hosts = parse_hosts(text)
    except ValueError:
        return
    assert hosts
    for host in hosts:
        assert not host.name.startswith("-")
        assert not set(host.name) & set(" \n[],=")
        assert host.slots is None or host.slots > 0


def test_hostfile():
    lines = """\
# the cluster
node1 slots=4

node2:2   # small
node3 slots = 3 max-slots=8
[fe80::2]:1
rack[1-2] slots=2
node4
""".splitlines()
    assert parse_hostfile(lines) == [
        Host("node1", 4),
        Host("node2", 2),
        Host("node3", 3),
        Host("fe80::2", 1),
        Host("rack1", 2),
        Host("rack2", 2),
        Host("node4"),
    ]


def test_a_host_on_several_lines_offers_the_sum():
    assert parse_hostfile(["a", "b slots=2", "a", "a slots=3", "b:1"]) == [
        Host("a", 5),
        Host("b", 3),
    ]


def test_hosts_that_offer_no_slots_are_left_out():
    assert parse_hosts("a:0,b:2,c:0,d") == [Host("b", 2), Host("d")]
    assert parse_hosts("a:0", may_be_none=True) == []
    assert parse_hostfile(["a slots=0", "b slots=2", "c:0", "a slots=1"]) == [
        Host("b", 2),
        Host("a", 1),
    ]
    with pytest.raises(ValueError, match="'a' is named twice"):
        parse_hosts("a:0,a:1")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["a slots=1", "", "b slots=x"], "line 3: 'x' is not a number of slots"),
        (["a slots=0", "b:0"], "it offers no slots"),
        (["a:2 slots=2"], "line 1: 'a' has its slots given twice"),
        (["a slots=2 slots=2"], "line 1: 'a' has its slots given twice"),
        (["a b"], "line 1: 'b' is not of the form slots=N"),
        (["a cpus=2"], "line 1: 'cpus=2' is not of the form slots=N"),
        (["a,b"], "line 1: 'a,b' is not of the form"),
        (["# nothing", ""], "it names no host"),
    ],
)
def test_mistakes_in_a_hostfile_name_the_line(lines: list[str], why: str):
    with pytest.raises(ValueError, match=why):
        parse_hostfile(lines)


def test_local_names():
    assert is_local("localhost")
    assert is_local(socket.gethostname())
    assert is_local("127.0.0.1")
    assert not is_local("some-other-host.example")
    assert not is_local("192.0.2.1")
    assert not is_local("2001:db8::7")


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


@pytest.mark.parametrize(
    ("hosts", "num_proc", "counts"),
    [
        ("a,b,c", 7, {"a": 3, "b": 2, "c": 2}),
        ("a,b:1,c", 5, {"a": 2, "b": 1, "c": 2}),
        ("a,b:4", 3, {"b": 3}),
        ("a,b", 1, {"a": 1}),
    ],
)
def test_hosts_without_slots_share_what_is_left(hosts: str, num_proc: int, counts: dict[str, int]):
    plan = plan_slots(parse_hosts(hosts), num_proc)
    assert Counter(slot.hostname for slot in plan) == counts


def test_too_few_slots():
    with pytest.raises(ValueError, match="offer 3 slots, but 4 processes"):
        plan_slots([Host("a", 1), Host("b", 2)], 4)


@given(
    st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=12),
    st.integers(1, 40),
)
def test_every_plan_is_right(offers: list[int | None], num_proc: int):
    hosts = [Host(f"h{index}", slots) for index, slots in enumerate(offers)]
    if None not in offers and sum(filter(None, offers)) < num_proc:
        with pytest.raises(ValueError, match=f"{num_proc} processes"):
            plan_slots(hosts, num_proc)
        return
    plan = plan_slots(hosts, num_proc)
    assert [slot.rank for slot in plan] == list(range(num_proc))
    assert {slot.size for slot in plan} == {num_proc}
    names = [slot.hostname for slot in plan]
    # Contiguous, in the order given: sorting by the host's place changes nothing.
    assert names == sorted(names, key=lambda name: int(name[1:]))
    for host in hosts:
        here = [slot for slot in plan if slot.hostname == host.name]
        assert host.slots is None or len(here) <= host.slots
        assert [slot.local_rank for slot in here] == list(range(len(here)))
        assert {slot.local_size for slot in here} <= {len(here)}
    for local_rank in {slot.local_rank for slot in plan}:
        peers = [slot for slot in plan if slot.local_rank == local_rank]
        assert [slot.cross_rank for slot in peers] == list(range(len(peers)))
        assert {slot.cross_size for slot in peers} == {len(peers)}
