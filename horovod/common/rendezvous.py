"""How the ranks of a job meet: `connect` gives every rank the job's store.

Called by the engine at every ``init``. horovodrun serves the store itself and tells the ranks by
environment. Under other launchers rank 0 serves it, and hands its address and a fresh key to the
others over something that the launcher gave (`horovod.common.bootstraps` lists the ways and what
each trusts); everything after that is authenticated with the key.

A process meets the others once. Later calls (re-initialisation, elastic training) reuse what it
learned, and rank 0's server lives as long as its process; callers separate their generations by
key prefixes. A forked child inherits none of it.
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

from horovod.common.addresses import LOOPBACK, is_local, resolve, routable_address
from horovod.common.bootstraps import (
    Bootstrap,
    FixedAddress,
    LocalSocket,
    MpiBroadcast,
    SharedFile,
    StoreOfTorch,
)
from horovod.common.config import Config
from horovod.common.environments import Elastic, Environment, RendezvousMethod
from horovod.common.launcher_process import launcher_process
from horovod.common.launcher_store import (
    SECRET_KEY,
    STORE_ADDRESS,
    STORE_PORT,
    StoreAddress,
    launchers_store,
)
from horovod.common.store import MemoryStore, Store, StoreServer
from horovod.common.topology import Topology
from horovod.common.wire import decode_key, encode_key, new_key

_MET = "horovod.rendezvous/met"
_RETRY_PAUSE = 0.05


class _Met:
    """What this process learned when it met the others, for its later calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.servers: dict[tuple[str, str, int], tuple[StoreServer, Bootstrap]] = {}
        self.offers: dict[tuple[str, str, int], StoreAddress] = {}


_met = _Met()


def _after_fork_in_child() -> None:
    global _met
    for _, bootstrap in _met.servers.values():
        bootstrap.forget_after_fork()
    _met = _Met()


os.register_at_fork(after_in_child=_after_fork_in_child)


def connect(
    environment: Environment, config: Config, environ: Mapping[str, str] = os.environ
) -> Store:
    """The job's store for this rank.

    `TimeoutError` when the ranks do not meet within ``config.start_timeout`` seconds,
    `ConnectionError` or `PermissionError` when the launcher's store cannot be used, `ValueError`
    when the launcher's variables do not suffice.
    """
    topology = environment.topology()
    if isinstance(environment, Elastic):
        return environment.world()
    if topology.size == 1:
        return MemoryStore()
    if environment.meeting is RendezvousMethod.LAUNCHER_STORE and environ.get(STORE_ADDRESS):
        return launchers_store(environ).connect(config.start_timeout)
    with _met.lock:
        return _Host(environment, topology, config, environ).store()


class _Closing:
    """Takes rank 0's offer away: once, and never from a forked child.

    At the end of the process it waits for a thread that is about it: torch's store aborts the
    process if Python ends under a call of its.
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


class _Host:
    """One meeting in which rank 0 is the host."""

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
        self._one_host = topology.local_size == topology.size
        self._identity = (environment.name, environment.job_id() or "", topology.size)
        secret = environ.get(SECRET_KEY)
        self._shared_key = decode_key(secret) if secret else None

    def store(self) -> Store:
        deadline = time.monotonic() + self._config.start_timeout
        if self._topology.rank == 0:
            if self._identity not in _met.servers:
                _met.servers[self._identity] = self._serve(deadline)
            return _met.servers[self._identity][0].store
        if self._identity in _met.offers:
            return _met.offers[self._identity].connect(self._config.start_timeout)
        return self._join(deadline)

    def _serve(self, deadline: float) -> tuple[StoreServer, Bootstrap]:
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
        closing = _Closing(bootstrap)
        atexit.register(closing)
        threading.Thread(
            target=self._finish_when_met,
            args=(server, closing),
            name="horovod-rendezvous",
            daemon=True,
        ).start()
        return server, bootstrap

    def _finish_when_met(self, server: StoreServer, closing: _Closing) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        try:
            for rank in range(1, self._topology.size):
                server.store.get(f"{_MET}/{rank}", deadline - time.monotonic())
        except TimeoutError:
            pass  # whoever waits for the missing rank reports it
        closing()

    def _join(self, deadline: float) -> Store:
        bootstrap = self._bootstrap()
        while True:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                offer = self._read(bootstrap.fetch(left))
                client = offer.connect(left)
                client.set(f"{_MET}/{self._topology.rank}", b"")
                break
            except (ConnectionError, PermissionError, TimeoutError) as error:
                # Nobody there, or somebody else: what an earlier run left behind. Ask again.
                if time.monotonic() + _RETRY_PAUSE >= deadline:
                    raise self._failure(bootstrap, error) from error
                time.sleep(_RETRY_PAUSE)
        _met.offers[self._identity] = offer
        return client

    def _read(self, text: str) -> StoreAddress:
        content = json.loads(text)
        if self._shared_key is None and "key" not in content:
            raise ValueError(
                f"rank 0 has the job's key from {SECRET_KEY}, but {self._who()} does not: set it "
                f"for all ranks or for none"
            )
        key = self._shared_key or decode_key(content["key"])
        return StoreAddress(content["address"], content["port"], key)

    def _address(self, bootstrap: Bootstrap) -> str:
        if isinstance(bootstrap, FixedAddress):
            ours = [address for address in resolve(self._master()[0]) if is_local(address)]
            if ours:
                return ours[0]
        if self._one_host:
            return LOOPBACK
        names = [
            self._environ.get(name, "") for name in ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR")
        ]
        return routable_address(self._config.gloo_iface, names)

    def _master(self) -> tuple[str, int]:
        address, port = self._environ.get("MASTER_ADDR", ""), self._environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            raise ValueError(
                f"{self._environment.name} set MASTER_ADDR={address or 'nothing'} and "
                f"MASTER_PORT={port or 'nothing'}, but {self._topology.size} ranks need both to "
                f"meet"
            )
        return address, int(port)

    def _bootstrap(self) -> Bootstrap:
        meeting = self._environment.meeting
        fixed = self._shared_key is not None and bool(self._environ.get("MASTER_ADDR"))
        if meeting is RendezvousMethod.TORCH_STORE:
            return self._torch_store()
        if meeting is RendezvousMethod.LAUNCHER_STORE:
            if fixed:
                return FixedAddress(*self._master())
            raise ValueError(
                f"HOROVOD_SIZE={self._topology.size}, but nothing says where the ranks meet: start "
                f"the job with horovodrun, or set {STORE_ADDRESS}, {STORE_PORT} and {SECRET_KEY}"
            )
        job = self._environment.job_id()
        if self._one_host and sys.platform == "linux":
            name = job or launcher_process()
            return LocalSocket(name, self._topology.rank, self._topology.size)
        if fixed:
            return FixedAddress(*self._master())
        if meeting is RendezvousMethod.MPI:
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
        address, port = self._master()
        agent = self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serve = self._topology.rank == 0 and not agent
        timeout = self._config.start_timeout
        job = self._environment.job_id() or ""
        try:
            return StoreOfTorch(address, port, job, serve, timeout)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConnectionError(
                f"{self._who()} cannot use torch's TCPStore at MASTER_ADDR={address}, "
                f"MASTER_PORT={port} within {timeout:g} s ({error}): check that rank 0 runs, that "
                f"this host may connect to that address, and that no other job has the port"
            ) from error

    def _who(self) -> str:
        return (
            f"rank {self._topology.rank} of {self._topology.size} (started by "
            f"{self._environment.name})"
        )

    def _failure(self, bootstrap: Bootstrap, error: Exception) -> TimeoutError:
        return TimeoutError(
            f"{self._who()} did not meet rank 0 within {self._config.start_timeout:g} s through "
            f"{bootstrap.where}: {error}. Check that all {self._topology.size} ranks run and call "
            f"init(), and that this host can connect to rank 0's; a slow start needs a larger "
            f"HOROVOD_START_TIMEOUT."
        )
