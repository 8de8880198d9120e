"""The service where compute workers and training processes of the TF data service meet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common.exceptions import TimeoutException
from horovod.common.wire import new_key
from horovod.runner.compute_service import (
    ComputeClient,
    ComputeService,
    NoValidAddressesFound,
)
from tests.effort import examples
from tests.ports import reserved_port

LONG = 60.0
KEY = new_key()


@contextmanager
def serving(
    dispatchers: int = 2, workers_per_dispatcher: int = 2
) -> Iterator[tuple[ComputeService, ComputeClient]]:
    service = ComputeService(dispatchers, workers_per_dispatcher, KEY)
    client = ComputeClient(service.addresses(), KEY)
    try:
        yield service, client
    finally:
        client.close()
        service.shutdown()


@pytest.fixture
def service() -> Iterator[ComputeService]:
    with serving() as (service, _):
        yield service


@pytest.fixture
def client(service: ComputeService) -> Iterator[ComputeClient]:
    client = ComputeClient(service.addresses(), KEY)
    yield client
    client.close()


def in_background(call: Callable[[], object]) -> Callable[[], object]:
    """Start a call; what is returned waits for its result."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result() -> object:
        thread.join(LONG)
        assert results, "the call failed or hangs"
        return results[0]

    return result


@pytest.mark.parametrize("counts", [(0, 1), (-1, 1), (1, 0), (1, -2)])
def test_counts_must_be_positive(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="larger than 0"):
        ComputeService(*counts, KEY)


def test_listens_on_loopback_unless_told_otherwise(service: ComputeService) -> None:
    [endpoints] = service.addresses().values()
    [(address, port)] = endpoints
    assert address == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=LONG)


def test_listens_on_the_interfaces_asked_for() -> None:
    service = ComputeService(1, 1, KEY, nics=["lo", "127.0.0.2"])
    addresses = service.addresses()
    assert {nic: endpoints[0][0] for nic, endpoints in addresses.items()} == {
        "lo": "127.0.0.1",
        "127.0.0.2": "127.0.0.2",
    }
    first, second = (ComputeClient({nic: endpoints}, KEY) for nic, endpoints in addresses.items())
    first.register_dispatcher(0, "grpc://here")
    assert second.wait_for_dispatcher_registration(0, LONG) == "grpc://here"
    service.shutdown()
    with pytest.raises(ValueError, match="no network interface 'none7'"):
        ComputeService(1, 1, KEY, nics=["none7"])


@pytest.mark.parametrize("bad", [-1, 2, 100])
def test_dispatcher_ids_are_checked(client: ComputeClient, bad: int) -> None:
    for call, argument in (
        (client.register_dispatcher, "grpc://a"),
        (client.wait_for_dispatcher_registration, LONG),
        (client.register_worker_for_dispatcher, 0),
        (client.wait_for_dispatcher_worker_registration, LONG),
    ):
        with pytest.raises(IndexError, match=rf"^Dispatcher id must be within \[0\.\.1\]: {bad}\b"):
            call(bad, argument)  # type: ignore[operator]


def test_a_dispatcher_registers_once(client: ComputeClient, service: ComputeService) -> None:
    other = ComputeClient(service.addresses(), KEY)
    client.register_dispatcher(0, "grpc://a:1")
    other.register_dispatcher(0, "grpc://a:1")
    with pytest.raises(
        ValueError, match="already been registered under different address grpc://a:1: grpc://"
    ):
        other.register_dispatcher(0, "grpc://a:2")
    other.register_dispatcher(1, "grpc://a:2")
    assert client.wait_for_dispatcher_registration(0, LONG) == "grpc://a:1"
    assert client.wait_for_dispatcher_registration(1, LONG) == "grpc://a:2"
    other.close()


def test_of_dispatchers_that_register_at_once_one_wins(service: ComputeService) -> None:
    start = threading.Barrier(8, timeout=LONG)

    def register(number: int) -> str | None:
        client = ComputeClient(service.addresses(), KEY)
        start.wait()
        try:
            client.register_dispatcher(0, f"grpc://a:{number}")
            return f"grpc://a:{number}"
        except ValueError:
            return None

    results = [in_background(lambda number=number: register(number)) for number in range(8)]
    [winner] = [address for result in results if (address := result()) is not None]
    asking = ComputeClient(service.addresses(), KEY)
    assert asking.wait_for_dispatcher_registration(0, LONG) == winner


@settings(max_examples=examples(40), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 4)),
    registrations=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5)), max_size=30),
)
def test_a_dispatcher_is_complete_when_it_has_its_own_workers(
    shape: tuple[int, int], registrations: list[tuple[int, int]]
) -> None:
    dispatchers, workers_per_dispatcher = shape
    known: dict[int, set[int]] = {dispatcher: set() for dispatcher in range(dispatchers)}
    with serving(dispatchers, workers_per_dispatcher) as (_, client):
        for dispatcher, worker in registrations:
            if dispatcher < dispatchers:
                client.register_worker_for_dispatcher(dispatcher, worker)
                known[dispatcher].add(worker)
        for dispatcher, workers in known.items():
            if len(workers) >= workers_per_dispatcher:
                client.wait_for_dispatcher_worker_registration(dispatcher, LONG)
            else:
                with pytest.raises(
                    TimeoutException,
                    match=f"to register: {len(workers)} of {workers_per_dispatcher} workers",
                ):
                    client.wait_for_dispatcher_worker_registration(dispatcher, 0)


def test_waits_end_when_the_others_register(service: ComputeService) -> None:
    def waiting(method: str) -> Callable[[], object]:
        client = ComputeClient(service.addresses(), KEY)
        return in_background(lambda: (getattr(client, method)(1, LONG), client.close())[0])

    address = waiting("wait_for_dispatcher_registration")
    workers = waiting("wait_for_dispatcher_worker_registration")
    registering = ComputeClient(service.addresses(), KEY)
    registering.register_dispatcher(1, "grpc://a")
    assert address() == "grpc://a"
    many = [
        in_background(
            lambda worker=worker: ComputeClient(
                service.addresses(), KEY
            ).register_worker_for_dispatcher(1, worker)
        )
        for worker in range(2)
    ]
    assert [register() for register in many] == [None, None]
    assert workers() is None


def test_waiting_has_an_end(client: ComputeClient) -> None:
    with pytest.raises(
        TimeoutException, match=r"^Timed out waiting for dispatcher 1 to register: .* 0\.05 s"
    ):
        client.wait_for_dispatcher_registration(1, 0.05)
    client.register_worker_for_dispatcher(1, 0)
    with pytest.raises(TimeoutException, match="1 of 2 workers of dispatcher 1"):
        client.wait_for_dispatcher_worker_registration(1, 0.05)
    assert issubclass(TimeoutException, TimeoutError)


def test_shutdown_reaches_those_who_wait_and_those_who_ask_later(service: ComputeService) -> None:
    clients = [ComputeClient(service.addresses(), KEY) for _ in range(3)]
    waits = [in_background(client.wait_for_shutdown) for client in clients[:2]]
    clients[2].shutdown()
    assert [wait() for wait in waits] == [None, None]
    clients[2].wait_for_shutdown()


def test_whoever_has_another_key_is_refused(service: ComputeService, client: ComputeClient) -> None:
    with pytest.raises(PermissionError, match="different keys"):
        ComputeClient(service.addresses(), new_key())
    with pytest.raises(ValueError, match="32 bytes"):
        ComputeClient(service.addresses(), b"short")
    [[(address, port)]] = service.addresses().values()
    with socket.create_connection((address, port), timeout=LONG) as stranger:
        stranger.sendall(b"\x80\x04\x95cos\nsystem\n" + bytes(200))
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass
    client.register_dispatcher(0, "grpc://a")  # and the service serves on


def test_the_first_address_that_works_is_taken(service: ComputeService) -> None:
    with reserved_port() as nobody:
        client = ComputeClient({"eth0": [("127.0.0.1", nobody)], **service.addresses()}, KEY)
    client.register_dispatcher(0, "grpc://a")
    assert client.own_address == "127.0.0.1"


def test_no_address_that_works() -> None:
    with (
        reserved_port() as nobody,
        pytest.raises(NoValidAddressesFound, match="HOROVOD_GLOO_IFACE"),
    ):
        ComputeClient({"lo": [("127.0.0.1", nobody)]}, KEY)
    with pytest.raises(NoValidAddressesFound, match="no addresses"):
        ComputeClient({}, KEY)


def test_a_service_that_has_gone() -> None:
    def wait_in_vain() -> str:
        with pytest.raises(ConnectionError) as caught:
            client.wait_for_shutdown()
        return str(caught.value)

    with serving() as (service, client):
        told = in_background(wait_in_vain)
        service.shutdown()
        assert "lost the compute service" in str(told())


def test_the_key_is_random() -> None:
    assert len({new_key() for _ in range(10)}) == 10
    assert len(new_key()) == 32
