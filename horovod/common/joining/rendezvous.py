"""How the ranks of a job find each other: `connect` gives every rank the job's store.

Called by the engine at every ``init``. horovodrun serves the store itself and tells the ranks by
environment variables. Under other launchers rank 0 serves it, and passes its address and a fresh
key to the others over something that the launcher gave (`bootstraps` lists the ways, and what each
trusts). Everything after that is authenticated with the key.

A process does this once. Later calls (re-initialisation, elastic training) reuse the result, and
rank 0's server lives as long as its process; callers separate their generations by key prefixes. A
forked child inherits none of it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod.common.config import Config
from horovod.common.environments import Elastic, Environment, RendezvousMethod
from horovod.common.joining.addresses import LOOPBACK, is_local, resolve, routable_address
from horovod.common.joining.bootstraps import (
    Bootstrap,
    FixedAddress,
    LocalSocket,
    MpiBroadcast,
    SharedFile,
    StoreOfTorch,
    launcher_process,
)
from horovod.common.joining.launcher_store import (
    SECRET_KEY,
    STORE_ADDRESS,
    STORE_PORT,
    StoreAddress,
    launchers_store,
)
from horovod.common.store import MemoryStore, Store, StoreServer
from horovod.common.topology import Topology
from horovod.common.wire import decode_key, encode_key, new_key

_ARRIVED = "horovod.rendezvous/arrived"
_RETRY_PAUSE = 0.05


class _Results:
    """The results of this process's first calls, by job, for its later calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.servers: dict[tuple[str, str, int], tuple[StoreServer, Bootstrap]] = {}  # on rank 0
        self.offers: dict[tuple[str, str, int], StoreAddress] = {}  # on other ranks
        self.of_communicators: list[StoreServer] = []  # others may still read from them


_results = _Results()


def _after_fork_in_child() -> None:
    global _results
    for _, bootstrap in _results.servers.values():
        bootstrap.forget_after_fork()
    _results = _Results()


os.register_at_fork(after_in_child=_after_fork_in_child)


def connect(
    environment: Environment, config: Config, environ: Mapping[str, str] = os.environ
) -> Store:
    """Return the job's store for this rank.

    Args:
        environment: The launcher that started this process.
        config: The knobs of this process.
        environ: The variables of this process.

    Raises:
        TimeoutError: The ranks do not find each other within `config.start_timeout` seconds.
        ConnectionError: The launcher's store cannot be reached.
        PermissionError: The launcher's store has another key.
        ValueError: The launcher's variables do not suffice.
    """
    topology = environment.topology()
    if isinstance(environment, Elastic):
        return environment.generation()
    if topology.size == 1:
        return MemoryStore()
    if environment.rendezvous is RendezvousMethod.LAUNCHER_STORE and environ.get(STORE_ADDRESS):
        return launchers_store(environ).connect(config.start_timeout)
    with _results.lock:
        return _ServedByRankZero(environment, topology, config, environ).store()


def connect_by_communicator(comm: Any, config: Config) -> tuple[Topology, Store]:
    """Return our ranks in `comm`, and a store that its ranks share. Collective over `comm`.

    `comm` is the mpi4py communicator that the user has passed to ``init(comm=...)``.
    """
    from mpi4py import MPI

    rank, size = comm.Get_rank(), comm.Get_size()
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, local_size = host.Get_rank(), host.Get_size()
    host.Free()
    cross = comm.Split(local_rank)
    topology = Topology(rank, size, local_rank, local_size, cross.Get_rank(), cross.Get_size())
    cross.Free()
    store: StoreAddress | None = None
    if rank == 0:
        address = LOOPBACK if local_size == size else routable_address(config.gloo_iface)
        key = new_key()
        server = StoreServer(address, key)
        _results.of_communicators.append(server)
        store = StoreAddress(server.address, server.port, key)
    store = comm.bcast(store, root=0)
    assert store is not None, "rank 0 has sent it"
    return topology, store.connect(config.start_timeout)


class _Withdrawal:
    """Takes rank 0's offer away: once, and never from a forked child.

    The lock makes the end of the process wait for a thread that is doing it: torch's store aborts
    the process if Python ends during one of its calls.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._done = False

    def __call__(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._done:
                self._done = True
                self._bootstrap.finish()


class _ServedByRankZero:
    """One rendezvous in which rank 0 serves the store."""

    def __init__(
        self,
        environment: Environment,
        topology: Topology,
        config: Config,
        environ: Mapping[str, str],
    ) -> None:
        self._environment = environment
        self._topology = topology
        self._config = config
        self._environ = environ
        self._is_one_host = topology.local_size == topology.size
        self._identity = (environment.name, environment.job_id() or "", topology.size)
        secret = environ.get(SECRET_KEY)
        self._shared_key = decode_key(secret) if secret else None

    def store(self) -> Store:
        """Return the store; on rank 0 serve it first, unless that was done before."""
        deadline = time.monotonic() + self._config.start_timeout
        if self._topology.rank == 0:
            if self._identity not in _results.servers:
                _results.servers[self._identity] = self._serve(deadline)
            return _results.servers[self._identity][0].store
        if self._identity in _results.offers:
            return _results.offers[self._identity].connect(self._config.start_timeout)
        return self._join(deadline)

    def _serve(self, deadline: float) -> tuple[StoreServer, Bootstrap]:
        """Serve a store as rank 0, and publish its address and key."""
        bootstrap = self._bootstrap()
        key = self._shared_key or new_key()
        port = self._master()[1] if isinstance(bootstrap, FixedAddress) else 0
        server = StoreServer(self._address(bootstrap), key, port)
        content = {"address": server.address, "port": server.port}
        if self._shared_key is None:
            content["key"] = encode_key(key)
        try:
            bootstrap.publish(json.dumps(content), max(deadline - time.monotonic(), 0.001))
        except BaseException as error:
            server.close()
            bootstrap.finish()
            if isinstance(error, TimeoutError):
                raise self._failure(bootstrap, error) from error
            raise
        withdraw = _Withdrawal(bootstrap)
        atexit.register(withdraw)
        # A rank whose last value this process has seen gets its answer, too, before the end.
        atexit.register(server.close)
        threading.Thread(
            target=self._withdraw_when_all_arrived,
            args=(server, withdraw),
            name="horovod-rendezvous",
            daemon=True,
        ).start()
        return server, bootstrap

    def _withdraw_when_all_arrived(self, server: StoreServer, withdraw: _Withdrawal) -> None:
        """Take the offer away once all ranks have connected, or time is up."""
        deadline = time.monotonic() + self._config.start_timeout
        try:
            for rank in range(1, self._topology.size):
                server.store.get(f"{_ARRIVED}/{rank}", deadline - time.monotonic())
        except TimeoutError:
            pass  # the ranks that wait for the missing one report it
        withdraw()

    def _join(self, deadline: float) -> Store:
        """Fetch rank 0's offer, and connect to its store."""
        bootstrap = self._bootstrap()
        while True:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                offer = self._read(bootstrap.fetch(left))
                client = offer.connect(left)
                client.set(f"{_ARRIVED}/{self._topology.rank}", b"")
                break
            except (ConnectionError, PermissionError, TimeoutError) as error:
                # The offer may be one that an earlier run left behind. Ask again.
                if time.monotonic() + _RETRY_PAUSE >= deadline:
                    raise self._failure(bootstrap, error) from error
                time.sleep(_RETRY_PAUSE)
        _results.offers[self._identity] = offer
        return client

    def _read(self, text: str) -> StoreAddress:
        """Return the address in an offer, with the key."""
        content = json.loads(text)
        if self._shared_key is None and "key" not in content:
            raise ValueError(
                f"rank 0 has the job's key from {SECRET_KEY}, but {self._own_name()} does not: "
                f"set it for all ranks or for none"
            )
        key = self._shared_key or decode_key(content["key"])
        return StoreAddress(content["address"], content["port"], key)

    def _address(self, bootstrap: Bootstrap) -> str:
        """Return the address on which rank 0 serves the store."""
        if isinstance(bootstrap, FixedAddress):
            ours = [address for address in resolve(self._master()[0]) if is_local(address)]
            if ours:
                return ours[0]
        if self._is_one_host:
            return LOOPBACK
        names = [
            self._environ.get(name, "") for name in ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR")
        ]
        return routable_address(self._config.gloo_iface, names)

    def _master(self) -> tuple[str, int]:
        """Return MASTER_ADDR and MASTER_PORT; raise ValueError if one is missing."""
        address, port = self._environ.get("MASTER_ADDR", ""), self._environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            raise ValueError(
                f"{self._environment.name} set MASTER_ADDR={address or 'nothing'} and "
                f"MASTER_PORT={port or 'nothing'}, but {self._topology.size} ranks need both to "
                f"meet"
            )
        return address, int(port)

    def _bootstrap(self) -> Bootstrap:
        """Choose how rank 0 passes its offer to the others. All ranks choose the same."""
        method = self._environment.rendezvous
        has_fixed_address = self._shared_key is not None and bool(self._environ.get("MASTER_ADDR"))
        if method is RendezvousMethod.TORCH_STORE:
            return self._torch_store()
        if method is RendezvousMethod.LAUNCHER_STORE:
            if has_fixed_address:
                return FixedAddress(*self._master())
            raise ValueError(
                f"HOROVOD_SIZE={self._topology.size}, but nothing says where the ranks meet: start "
                f"the job with horovodrun, or set {STORE_ADDRESS}, {STORE_PORT} and {SECRET_KEY}"
            )
        job = self._environment.job_id()
        if self._is_one_host and sys.platform == "linux":
            name = job or launcher_process()
            return LocalSocket(name, self._topology.rank, self._topology.size)
        if has_fixed_address:
            return FixedAddress(*self._master())
        if method is RendezvousMethod.MPI:
            mpi = MpiBroadcast.create(
                self._topology.rank, self._topology.size, not self._config.mpi_threads_disable
            )
            if mpi is not None:
                return mpi
        if job is None:
            raise ValueError(
                f"{self._environment.name} started ranks on several hosts but gave the job no "
                f"name by which they could meet: install mpi4py for this MPI, or set MASTER_ADDR, "
                f"MASTER_PORT and {SECRET_KEY} for all ranks"
            )
        return SharedFile(job, Path.home() / ".horovod" / "jobs")

    def _torch_store(self) -> Bootstrap:
        """Return the way over torch's TCPStore, which rank 0 serves where no agent does."""
        address, port = self._master()
        agent = self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serve = self._topology.rank == 0 and not agent
        timeout = self._config.start_timeout
        job = self._environment.job_id() or ""
        try:
            return StoreOfTorch(address, port, job, serve, timeout)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConnectionError(
                f"{self._own_name()} cannot use torch's TCPStore at MASTER_ADDR={address}, "
                f"MASTER_PORT={port} within {timeout:g} s ({error}): check that rank 0 runs, that "
                f"this host may connect to that address, and that no other job has the port"
            ) from error

    def _own_name(self) -> str:
        """Return the name of this rank for error messages."""
        return (
            f"rank {self._topology.rank} of {self._topology.size} (started by "
            f"{self._environment.name})"
        )

    def _failure(self, bootstrap: Bootstrap, error: Exception) -> TimeoutError:
        """Return the error for ranks that did not find each other in time."""
        return TimeoutError(
            f"{self._own_name()} did not meet rank 0 within {self._config.start_timeout:g} s "
            f"through {bootstrap.where}: {error}. Check that all {self._topology.size} ranks run "
            f"and call init(), and that this host can connect to rank 0's; a slow start needs a "
            f"larger HOROVOD_START_TIMEOUT."
        )
