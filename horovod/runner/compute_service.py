"""Let compute workers and training processes of TensorFlow's data service find each other.

`horovod.tensorflow.data` uses it. Rank 0 of the compute workers runs a `ComputeService`, and all
processes talk to it with a `ComputeClient`. Dispatchers register their addresses, workers register
for a dispatcher, training processes wait for both, and `shutdown` ends the service.

The service is the project's authenticated store (`horovod.common.store`) with these entries, so
every byte is authenticated with the service's key and nothing is ever unpickled:

    layout                      numbers of dispatchers and of workers for each
    dispatcher/<id>/claims      how many processes wanted to be this dispatcher
    dispatcher/<id>/address     the address of the first of them
    worker/<dispatcher>/<id>    exists for each worker that has registered
    complete/<dispatcher>       exists once this dispatcher has all its workers
    shutdown                    exists once the end was asked for
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from horovod.common.exceptions import TimeoutException
from horovod.common.joining.addresses import LOOPBACK, is_loopback
from horovod.common.logging import get_logger
from horovod.common.store import MemoryStore, StoreClient, StoreServer
from horovod.runner.agents.probe import interface_address, source_towards

Addresses = Mapping[str, Sequence[tuple[str, int]]]
"""For each network interface, the addresses and ports at which the service listens."""

_CONNECT_TIMEOUT = 20.0
_CLAIM_TIMEOUT = 20.0  # seconds between a dispatcher's claim and its address, at the very most
_LONG = 1e6  # seconds


class NoValidAddressesFound(ConnectionError):
    """A service answers at none of its known addresses."""


class ComputeService:
    """Serves processes that know the key, until `shutdown`."""

    def __init__(
        self,
        dispatchers: int,
        workers_per_dispatcher: int,
        key: bytes,
        nics: Sequence[str] | None = None,
    ) -> None:
        """Start to serve.

        Args:
            dispatchers: The number of dispatchers.
            workers_per_dispatcher: The number of workers for each.
            key: The key that clients must know.
            nics: Names of interfaces, or addresses of this host, to listen at; by default loopback,
                which only processes of this host reach.

        Raises:
            ValueError: If a number is not positive, or an interface has no address.
        """
        if dispatchers <= 0:
            raise ValueError(f"dispatchers must be larger than 0, not {dispatchers}")
        if workers_per_dispatcher <= 0:
            raise ValueError(
                f"workers_per_dispatcher must be larger than 0, not {workers_per_dispatcher}"
            )
        self._store = MemoryStore()
        self._store.set("layout", json.dumps([dispatchers, workers_per_dispatcher]).encode())
        self._servers: dict[str, StoreServer] = {}
        try:
            for nic in nics or [LOOPBACK]:
                self._servers[nic] = StoreServer(_address_of(nic), key, store=self._store)
        except BaseException:
            self.shutdown()
            raise

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return the addresses and ports of the service, by network interface."""
        return {nic: [(endpoint.address, endpoint.port)] for nic, endpoint in self._servers.items()}

    def shutdown(self) -> None:
        """Stop serving; clients that still wait for something see the connection end."""
        for server in self._servers.values():
            server.close()


class ComputeClient:
    """Talks to a `ComputeService`. All methods raise `ConnectionError` if the service has gone."""

    def __init__(self, compute_addresses: Addresses, key: bytes, verbose: int = 1) -> None:
        """Connect to the service.

        Args:
            compute_addresses: The addresses of the service; the first that answers is used.
            key: The key of the service.
            verbose: Above 1, the address that answers is logged.

        Raises:
            NoValidAddressesFound: If the service answers at none of the addresses.
            PermissionError: If the service has another key.
        """
        self._store = _connect(compute_addresses, key)
        self._where = f"{self._store.address}:{self._store.port}"
        if verbose > 1:
            get_logger(__name__).info("the compute service answers at %s", self._where)
        with self._service_errors():
            layout = json.loads(self._store.get("layout", _CONNECT_TIMEOUT))
        self._dispatchers, self._workers_per_dispatcher = map(int, layout)

    @property
    def own_address(self) -> str:
        """The address at which other processes of the service reach this host."""
        return source_towards(self._store.address) or LOOPBACK

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register the address of a dispatcher.

        Args:
            dispatcher_id: The number of the dispatcher.
            dispatcher_address: The address at which it listens.

        Raises:
            IndexError: If there is no such dispatcher.
            ValueError: If it is registered with another address.
        """
        self._check(dispatcher_id)
        entry = f"dispatcher/{dispatcher_id}"
        with self._service_errors():
            if self._store.add(f"{entry}/claims", 1) == 1:  # `add` is atomic: only one is first
                self._store.set(f"{entry}/address", dispatcher_address.encode())
                return
            known = self._store.get(f"{entry}/address", _CLAIM_TIMEOUT).decode()
        if known != dispatcher_address:
            raise ValueError(
                f"Dispatcher with id {dispatcher_id} has already been registered under different "
                f"address {known}: {dispatcher_address}. Start the compute workers anew for "
                f"another training job"
            )

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Wait until a dispatcher has registered, and return its address.

        Args:
            dispatcher_id: The number of the dispatcher.
            timeout: Seconds to wait.

        Raises:
            IndexError: If there is no such dispatcher.
            TimeoutException: If it does not register in time.
        """
        self._check(dispatcher_id)
        address = self._wait_for(f"dispatcher/{dispatcher_id}/address", timeout)
        if address is not None:
            return address.decode()
        raise TimeoutException(
            f"Timed out waiting for dispatcher {dispatcher_id} to register: dispatcher "
            f"{dispatcher_id} of {self._dispatchers} did not register with the compute service at "
            f"{self._where} within {timeout:g} s. Check that the processes that run dispatchers "
            f"have started, and give them more time with a larger timeout"
        )

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker for a dispatcher.

        Args:
            dispatcher_id: The number of the dispatcher.
            worker_id: The number of the worker.

        Raises:
            IndexError: If there is no such dispatcher.
        """
        self._check(dispatcher_id)
        with self._service_errors():
            self._store.set(f"worker/{dispatcher_id}/{worker_id}", b"")
            # Each writes first and counts then: of workers that register at the same time, the
            # last sees all of them.
            if len(self._store.keys(f"worker/{dispatcher_id}/")) >= self._workers_per_dispatcher:
                self._store.set(f"complete/{dispatcher_id}", b"")

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait until a dispatcher has all its workers.

        Args:
            dispatcher_id: The number of the dispatcher.
            timeout: Seconds to wait.

        Raises:
            IndexError: If there is no such dispatcher.
            TimeoutException: If workers are missing after that time.
        """
        self._check(dispatcher_id)
        if self._wait_for(f"complete/{dispatcher_id}", timeout) is not None:
            return
        with self._service_errors():
            arrived = len(self._store.keys(f"worker/{dispatcher_id}/"))
        raise TimeoutException(
            f"Timed out waiting for workers of dispatcher {dispatcher_id} to register: {arrived} "
            f"of {self._workers_per_dispatcher} workers of dispatcher {dispatcher_id} registered "
            f"with the compute service at {self._where} within {timeout:g} s. Check that all "
            f"compute workers have started, and give them more time with a larger timeout"
        )

    def shutdown(self) -> None:
        """End the service for all processes that wait for that, now or later."""
        with self._service_errors():
            self._store.set("shutdown", b"")

    def wait_for_shutdown(self) -> None:
        """Wait until a process has called `shutdown`, however long that takes."""
        while self._wait_for("shutdown", _LONG) is None:
            pass

    def close(self) -> None:
        """End this client's connections."""
        self._store.close()

    def _wait_for(self, key: str, timeout: float) -> bytes | None:
        """Return the value of an entry; None if it has none within this time."""
        with self._service_errors():
            try:
                return self._store.get(key, timeout)
            except TimeoutError:
                return None

    def _check(self, dispatcher_id: int) -> None:
        if not 0 <= dispatcher_id < self._dispatchers:
            raise IndexError(
                f"Dispatcher id must be within [0..{self._dispatchers - 1}]: {dispatcher_id}; "
                f"there is no dispatcher {dispatcher_id}"
            )

    @contextmanager
    def _service_errors(self) -> Iterator[None]:
        """Name the service in errors of the connection."""
        try:
            yield
        except ConnectionError as error:
            raise ConnectionError(
                f"lost the compute service at {self._where}: rank 0 of the compute workers, which "
                f"serves it, has probably ended; look at its output first"
            ) from error


def _address_of(nic: str) -> str:
    try:
        return str(ipaddress.ip_address(nic))
    except ValueError:
        address = interface_address(nic)
    if not address:
        raise ValueError(f"this host has no network interface {nic!r} with an IPv4 address")
    return address


def _connect(addresses: Addresses, key: bytes) -> StoreClient:
    failures: list[str] = []
    refused = False
    for address, port in [endpoint for endpoints in addresses.values() for endpoint in endpoints]:
        try:
            return StoreClient(address, port, key, _CONNECT_TIMEOUT)
        except PermissionError:
            refused = True
            failures.append(f"{address}:{port} (has another key)")
        except ConnectionError as error:
            failures.append(f"{address}:{port} ({error.__cause__ or error})")
    tried = ", ".join(failures) or "it has no addresses"
    if refused:
        raise PermissionError(
            f"the compute service and this process have different keys: {tried}. The "
            f"configuration is probably that of an earlier start of the compute workers"
        )
    hint = "check that the compute workers still run, and that this host may connect to theirs"
    if all(is_loopback(address) for endpoints in addresses.values() for address, _ in endpoints):
        hint = (
            "check that the compute workers still run. They listen on loopback, where only "
            "processes of their own host reach them: for others, start them with "
            "HOROVOD_GLOO_IFACE set to the network interface that leads there"
        )
    raise NoValidAddressesFound(f"cannot reach the compute service: {tried}; {hint}")
