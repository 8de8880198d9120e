"""What every store does, in one process and over the network."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horovod.common.store import MemoryStore, PrefixStore, Store, StoreClient, StoreServer
from horovod.common.wire import new_key
from tests.effort import examples

LONG = 200.0
SHORT = 0.05
KEY = new_key()


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", KEY)
    yield server
    server.close()


@pytest.fixture(params=["memory", "client", "prefix of memory", "prefix of client"])
def store(request: pytest.FixtureRequest, server: StoreServer) -> Iterator[Store]:
    for key in server.store.keys(""):
        server.store.delete(key)
    inner: Store = MemoryStore()
    if "client" in request.param:
        inner = StoreClient(server.address, server.port, KEY, LONG)
    yield PrefixStore(inner, "part") if "prefix" in request.param else inner
    inner.close()


def test_set_get_replace(store: Store) -> None:
    store.set("a", b"1")
    assert store.get("a", LONG) == b"1"
    store.set("a", b"")
    assert store.get("a", LONG) == b""
    assert store.try_get("a") == b""


def test_missing_key(store: Store) -> None:
    assert store.try_get("missing") is None
    with pytest.raises(TimeoutError, match="missing"):
        store.get("missing", SHORT)
    with pytest.raises(TimeoutError, match="missing"):
        store.get("missing", 0)


def test_get_waits_until_set(store: Store) -> None:
    values: list[bytes] = []
    thread = threading.Thread(target=lambda: values.append(store.get("late", LONG)))
    thread.start()
    store.set("late", b"value")
    thread.join(LONG)
    assert values == [b"value"]


def test_get_waits_for_a_counter(store: Store) -> None:
    values: list[bytes] = []
    thread = threading.Thread(target=lambda: values.append(store.get("late", LONG)))
    thread.start()
    store.add("late", 3)
    thread.join(LONG)
    assert values == [b"3"]


def test_the_first_key_that_has_a_value(store: Store) -> None:
    found: list[tuple[str, bytes]] = []
    thread = threading.Thread(target=lambda: found.append(store.get_any(["a", "b", "c"], LONG)))
    thread.start()
    store.set("b", b"2")
    thread.join(LONG)
    store.set("a", b"1")
    found.append(store.get_any(["c", "a", "b"], LONG))
    assert found == [("b", b"2"), ("a", b"1")]
    with pytest.raises(TimeoutError, match="missing"):
        store.get_any(["missing", "neither"], SHORT)


def test_add(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n", LONG) == b"-2"
    store.set("n", b"40")
    assert store.add("n", 2) == 42
    store.set("n", b"text")
    with pytest.raises(ValueError, match="not a counter"):
        store.add("n", 1)
    assert store.get("n", LONG) == b"text", "the store goes on working"


def test_add_is_atomic(store: Store) -> None:
    seen: list[int] = []

    def count() -> None:
        for _ in range(50):
            seen.append(store.add("n", 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(seen) == list(range(1, 201))


def test_delete(store: Store) -> None:
    store.set("a", b"1")
    assert store.delete("a") is True
    assert store.delete("a") is False
    assert store.try_get("a") is None


def test_keys(store: Store) -> None:
    for key in ("b/2", "b/1", "a", "ü/\n\0😀"):
        store.set(key, b"")
    assert store.keys("") == ["a", "b/1", "b/2", "ü/\n\0😀"]
    assert store.keys("b/") == ["b/1", "b/2"]
    assert store.keys("c") == []


def test_large_value(store: Store) -> None:
    value = os.urandom(1 << 20) * 8
    store.set("large", value)
    assert store.get("large", LONG) == value


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=examples(30),
)
@given(st.dictionaries(st.text(max_size=20), st.binary(max_size=50), max_size=5), st.text())
def test_behaves_like_a_dictionary(store: Store, content: dict[str, bytes], prefix: str) -> None:
    for key in store.keys(""):
        store.delete(key)
    for key, value in content.items():
        store.set(key, value)
    assert store.keys(prefix) == sorted(key for key in content if key.startswith(prefix))
    assert {key: store.get(key, LONG) for key in content} == content


def test_prefixes_do_not_meet(server: StoreServer) -> None:
    memory = MemoryStore()
    one, two = PrefixStore(memory, "1"), PrefixStore(memory, "12")
    one.set("2/x", b"one")
    assert two.keys("") == []
    assert two.try_get("x") is None
    assert memory.keys("") == ["1/2/x"]


def test_derived_keys_belong_to_their_purpose(store: Store) -> None:
    one, two = store.derive_key("links"), store.derive_key("other")
    assert len(one) == len(two) == 32
    assert one != two
    assert store.derive_key("links") == one
    assert PrefixStore(store, "links").derive_key("x") != store.derive_key("x")
    assert PrefixStore(store, "a").derive_key("x") != PrefixStore(store, "b").derive_key("x")


def test_all_clients_derive_the_same_and_strangers_do_not(server: StoreServer) -> None:
    clients = [StoreClient(server.address, server.port, KEY, LONG) for _ in range(2)]
    expected = server.store.derive_key("group/links")
    for client in clients:
        assert client.derive_key("group/links") == expected
        assert PrefixStore(client, "group").derive_key("links") == expected
        client.close()
    other = StoreServer("127.0.0.1", new_key())
    assert other.store.derive_key("group/links") != expected
    other.close()


def test_derived_keys_travel_nowhere(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    secret = store.derive_key("links")
    store.set("a", b"1")
    shown = f"{store!r} {store} {caplog.text} {store.keys('')}"
    for form in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1]):
        assert form not in shown
    assert secret not in [store.get(key, LONG) for key in store.keys("")]


def test_a_key_is_not_set_beside_an_obstacle() -> None:
    store, changed = MemoryStore(), []
    store.watch(changed.append)
    assert store.set_unless("decision", b"1", ["met/a", "met/b"])
    store.set("met/b", b"")
    assert not store.set_unless("decision", b"2", ["met/a", "met/b"])
    assert store.try_get("decision") == b"1"
    assert changed == ["decision", "met/b"]
