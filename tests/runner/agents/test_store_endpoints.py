"""Where the launcher serves the job's store."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading

import pytest

from horovod.common.store import MemoryStore, StoreClient
from horovod.common.wire import new_key
from horovod.runner.agents.probe import authenticate, probe
from horovod.runner.agents.store_endpoints import (
    StoreEndpoints,
    addresses_towards,
    describe_problem,
)

LONG = 100.0  # seconds


@pytest.fixture
def place():
    place = StoreEndpoints(new_key())
    yield place
    place.close()


def test_one_store_behind_all_doors(place: StoreEndpoints):
    endpoints = [place.open("127.0.0.1"), place.open("127.0.0.2")]
    assert place.open("127.0.0.1") == endpoints[0]
    assert place.endpoints == endpoints
    first, second = (StoreClient(*endpoint, place.key, LONG) for endpoint in endpoints)
    waiting = threading.Thread(target=lambda: second.set("answer", first.get("question", LONG)))
    waiting.start()
    second.set("question", b"42")
    assert first.get("answer", LONG) == b"42"
    waiting.join()
    assert place.store.try_get("answer") == b"42"


def test_doors_that_nobody_needs_are_closed(place: StoreEndpoints):
    kept, closed = place.open("127.0.0.1"), place.open("127.0.0.2")
    place.keep({kept})
    assert place.endpoints == [kept]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(closed, timeout=5)
    place.store.set("key", b"value")
    assert StoreClient(*kept, place.key, LONG).get("key", LONG) == b"value"


def test_a_reserved_port_is_free_again_when_the_job_is_over():
    place = StoreEndpoints(new_key())
    address = "127.0.0.5", place.reserve_port("127.0.0.5")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(address)
    place.close()
    with socket.socket() as stranger:
        stranger.bind(address)


def test_a_given_store_is_served():
    store = MemoryStore()
    place = StoreEndpoints(new_key(), store)
    try:
        StoreClient(*place.open("127.0.0.1"), place.key, LONG).set("key", b"value")
        assert store.try_get("key") == b"value"
    finally:
        place.close()


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (("127.0.0.1", "127.0.0.1"), ["127.0.0.1"]),  # what the host sees is ours
        (("192.0.2.7", "127.0.0.1"), []),  # it is not, and the way there is no way for others
    ],
)
def test_the_address_that_the_other_side_sees(ends: tuple[str, str], expected: list[str]):
    assert addresses_towards("localhost", ends, []) == expected


def test_chosen_interfaces_decide():
    assert addresses_towards("somewhere", ("192.0.2.7", "192.0.2.9"), ["nope0", "lo"]) == [
        "127.0.0.1"
    ]
    assert addresses_towards("somewhere", ("127.0.0.1", "127.0.0.1"), ["nope0"]) == []


def test_a_name_with_several_addresses(place: StoreEndpoints, monkeypatch: pytest.MonkeyPatch):
    address, port = place.open("127.0.0.1")
    stream = socket.AF_INET, socket.SOCK_STREAM, 0, ""
    found = [(*stream, ("127.0.0.3", port)), (*stream, (address, port))]  # nobody is at the first
    monkeypatch.setattr("_socket.getaddrinfo", lambda *arguments: found)
    question = place.question([], LONG, ["127.0.0.1"])
    answer = probe({**question, "endpoints": [("several.example", port)]})
    assert tuple(answer["endpoint"]) == ("several.example", port)


def test_a_host_finds_the_door_that_opens_to_its_key(place: StoreEndpoints):
    endpoint = place.open("127.0.0.1")
    with socket.socket() as bound:  # so that nobody else has it, and listening to nobody
        bound.bind(("127.0.0.3", 0))
        question = place.question(["lo", "nope0"], LONG, ["127.0.0.1"])
        answer = probe({**question, "endpoints": [bound.getsockname(), endpoint]})
    assert tuple(answer["endpoint"]) == endpoint
    assert answer["nics"] == {"lo": "127.0.0.1"}
    assert "lo" in answer["interfaces"]
    assert answer["address"] == "127.0.0.1"
    for _ in range(5):  # somebody else may have taken the port since
        with contextlib.suppress(OSError):
            socket.create_server((answer["address"], answer["port"])).close()
            break
        answer = probe(place.question([], LONG, ["127.0.0.1"]))
    else:
        pytest.fail("none of the ports was free")


def test_a_door_of_somebody_else_is_none(place: StoreEndpoints):
    endpoint = place.open("127.0.0.1")
    answer = probe({**place.question([], LONG), "key": new_key().hex()})
    assert answer["endpoint"] is None
    ((address, port, reason),) = answer["failures"]
    assert (address, port) == endpoint
    assert "key" in reason


@pytest.mark.parametrize("length", [0, 1, 55, 56, 70, 1000])
def test_what_a_host_proves_its_knowledge_with_is_an_hmac(length: int):
    key, message = new_key(), os.urandom(length)
    assert authenticate(key, message) == hmac.digest(key, message, "sha256")


def test_problems_for_people():
    unreached = {
        "endpoint": None,
        "failures": [["10.0.0.1", 4000, "timed out"], ["fe80::1", 4001, "refused"]],
    }
    said = describe_problem(unreached, [])
    assert "tried 10.0.0.1:4000 (timed out), [fe80::1]:4001 (refused). Let" in said
    assert said.endswith("with --network-interfaces")
    assert describe_problem(unreached, [], "nics").endswith("with nics")
    answer = {"endpoint": ["10.0.0.1", 4000], "nics": {}, "interfaces": ["lo", "eth0"]}
    assert describe_problem(answer, []) == ""
    assert describe_problem(answer, ["ib0"], "nics") == (
        "has no interface with an address among ib0 (nics); it has lo, eth0"
    )
