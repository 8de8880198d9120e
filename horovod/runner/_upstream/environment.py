"""Names of Horovod 0.28.1 about this process, its host, its job, its keys and its elastic driver.

They return addresses and interfaces of the host, variables that other hosts get, LSF's hosts,
objects as text, and digests by which two processes that share a key recognise each other. The names
at the end are those around its elastic driver. Our driver's own notices come through the job's
store (`horovod.common.generations.membership`); with `WorkerNotificationManager` a program may
give notice of others.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import random
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import cloudpickle
import psutil

from horovod.common.host import host_hash as host_hash
from horovod.common.joining.addresses import resolve
from horovod.common.wire import new_key as make_secret_key
from horovod.runner.elastic.discovery import HostUpdateResult
from horovod.runner.elastic.termination import RESET_LIMIT_EXCEEDED_MESSAGE
from horovod.runner.slots.allocation import read_lsf
from horovod.runner.slots.hosts import is_local
from horovod.runner.slots.worker_env import KEY as HOROVOD_SECRET_KEY
from horovod.runner.slots.worker_env import travelling_variables

__all__ = [
    "HOROVOD_SECRET_KEY",
    "RESET_LIMIT_EXCEEDED_MESSAGE",
    "HostUpdateResult",
    "host_hash",
    "make_secret_key",
]

Server = TypeVar("Server")

DIGEST_LENGTH = hashlib.sha256().digest_size
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"}
"""Upstream's list. More variables stay on this host: see `horovod.runner.slots.worker_env`."""

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_exportable(v: str) -> bool:
    """Return whether workers on another host get a variable of this name."""
    ignored = any(re.fullmatch(pattern, v) for pattern in IGNORE_REGEXES)
    return not ignored and v in travelling_variables({v: ""})


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size from the variables of a launcher; (0, 1) if there are none."""
    for rank, size in _PAIRS:
        values = os.environ.get(rank), os.environ.get(size)
        if values[0] is not None and values[1] is not None:
            return int(values[0]), int(values[1])
        if values != (None, None):
            missing = rank if values[0] is None else size
            raise RuntimeError(f"only one of {rank} and {size} is set: {missing} is missing")
    return 0, 1


class LSFUtils:
    """Tells what LSF says about the job that this process belongs to."""

    @staticmethod
    def using_lsf() -> bool:
        return bool(os.environ.get("LSB_JOBID"))

    @staticmethod
    def get_compute_hosts() -> list[str]:
        return [host.name for host in read_lsf(os.environ)]

    @staticmethod
    def get_num_processes() -> int:
        return sum(host.slots or 0 for host in read_lsf(os.environ))


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Return an object pickled, in base64: as text, or as bytes without `to_ascii`."""
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Return the object of `dumps_base64`.

    A person who can write such a text can run code here: use it only for text that you wrote.
    """
    return cloudpickle.loads(base64.b64decode(encoded))


def compute_digest(key: bytes, body: bytes) -> bytes:
    """Return the digest of a message, which only holders of the key can compute."""
    return hmac.digest(key, body, hashlib.sha256)


def check_digest(key: bytes, body: bytes, digest: bytes) -> bool:
    """Return whether a holder of the key made this digest."""
    return hmac.compare_digest(compute_digest(key, body), digest)


def get_local_host_addresses() -> set[str]:
    """Return the IPv4 addresses of this host."""
    return {address for addresses in _interfaces().values() for address in addresses}


def get_local_intfs(nic: Iterable[str] | None = None) -> set[str]:
    """Return the interfaces, among those named or all, that have the address 127.0.0.1."""
    found = {name for name, addresses in _interfaces().items() if "127.0.0.1" in addresses}
    return found if not nic else found & set(nic)


def resolve_host_address(host: str) -> str:
    """Return the address of a host; its name if the address is unknown."""
    return next(iter(resolve(host)), host)


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """Return the hosts that are other machines."""
    return [name for name in all_host_names if not is_local(name)]


def get_driver_ip(nics: Sequence[str]) -> str:
    """Return this host's address on one of these interfaces; RuntimeError if it has none there."""
    for name in nics:
        for address in _interfaces().get(name, ()):
            return address
    raise RuntimeError(f"this host has no IPv4 address on {', '.join(nics) or 'no interface'}")


def find_port(server_factory: Callable[[tuple[str, int]], Server]) -> tuple[Server, int]:
    """Make a server on a free port with `server_factory((address, port))`; return both."""
    ports = list(range(1024, 65536))
    random.shuffle(ports)
    for port in ports:
        try:
            return server_factory(("", port)), port
        except OSError:
            continue
    raise OSError("there is no free port")


def _interfaces() -> dict[str, list[str]]:
    entries: dict[str, Any] = psutil.net_if_addrs()
    return {
        name: [entry.address for entry in found if entry.family == socket.AF_INET]
        for name, found in entries.items()
    }


READY = "READY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"

GET_RANK_AND_SIZE = "rank_and_size"
PUT_WORKER_ADDRESSES = "worker_addresses"


@dataclass
class Results:
    """The end of a job: an error or None, and exit code and time by worker ("host[slot]")."""

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


class Listener(Protocol):
    """Receives notices; a `State` of ``hvd.elastic`` is one."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take notice that hosts have changed."""


@dataclass
class HostsUpdatedRequest:
    """Notice that hosts have changed, as upstream's driver sends it; nothing sends it here."""

    timestamp: float
    res: int = HostUpdateResult.no_update


class WorkerNotificationManager:
    """Notifies listeners that hosts have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Do nothing: the driver's decisions come through the job's store."""

    def register_listener(self, listener: Listener) -> None:
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notify all listeners, which react at their next check."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)
