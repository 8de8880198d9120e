"""How rank 0 passes the address and key of its store to the other ranks.

Needed where a foreign launcher started the job; used by `rendezvous` only. An
*offer* is a short text that names the store. Each class here is one way to pass it, over something
that the launcher itself gave and that we must therefore trust:

    LocalSocket   ranks of one host: an abstract Unix socket; both sides check the other's user
    StoreOfTorch  torch's TCPStore at MASTER_ADDR:MASTER_PORT, which is not authenticated: anybody
                  who reaches that port can join the job, as with plain torch.distributed. Setting
                  _HOROVOD_SECRET_KEY keeps the key out of it
    MpiBroadcast  MPI itself, through mpi4py
    SharedFile    a file that only this user can read, in the home directory that the hosts share
    FixedAddress  MASTER_ADDR:MASTER_PORT and a key that all ranks got in _HOROVOD_SECRET_KEY
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import json
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from horovod.common import mpi
from horovod.common.host import check_same_user
from horovod.common.logging import get_logger

T = TypeVar("T")

_PAUSE = 0.02
_MAX_OFFER = 4096
# At most 15 characters each, which is what the kernel keeps of a process's name.
_LAUNCHERS = {
    *("hydra_pmi_proxy", "jsmd", "mpiexec", "mpiexec.hydra", "mpirun", "mpirun_rsh", "mpispawn"),
    *("orted", "orterun", "palsd", "prted", "prterun", "slurmstepd"),
}


class Bootstrap(ABC):
    """One way to pass an offer from rank 0 to the others."""

    where: str
    """Where the ranks look for each other, for error messages."""

    @abstractmethod
    def publish(self, offer: str, timeout: float) -> None:
        """Make the offer available, on rank 0; raise TimeoutError if that is not possible."""

    @abstractmethod
    def fetch(self, timeout: float) -> str:
        """Return the offer, on the other ranks; raise TimeoutError if there is none in time.

        It may be the offer of an earlier run; the caller then finds nobody there and asks again.
        """

    def finish(self) -> None:  # noqa: B027 (optional: most ways leave nothing behind)
        """Take the offer away, on rank 0, when all ranks have connected."""

    def forget_after_fork(self) -> None:  # noqa: B027
        """Close descriptors in a forked child, where they would outlive the parent."""


def _check_offer(text: str) -> str:
    """Return an offer; raise ValueError if the text is not one."""
    if len(text) > _MAX_OFFER or not isinstance(json.loads(text), dict):
        raise ValueError("not an offer")
    return text


def _retry(attempt: Callable[[float], T], timeout: float, failure: str) -> T:
    """Return the result of `attempt`, which is called until it raises no error, or time is up.

    It gets the seconds that are left. At the end `failure` is the text of a TimeoutError.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return attempt(max(deadline - time.monotonic(), 0.001))
        except (OSError, ValueError) as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(failure) from error
        time.sleep(_PAUSE)


class LocalSocket(Bootstrap):
    """An abstract Unix socket (Linux): it has no file, and ends with rank 0."""

    def __init__(self, job: str, rank: int, size: int) -> None:
        digest = hashlib.sha256(f"{job}\0{size}".encode()).hexdigest()[:32]
        self.where = f"@horovod-{os.getuid()}-{digest}"
        self._name = "\0" + self.where[1:]
        self._rank = rank
        self._size = size
        self._listener: socket.socket | None = None
        self._finished = False

    def publish(self, offer: str, timeout: float) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        is_in_use = f"the local socket {self.where} is in use by another process"
        try:
            # An earlier program of the same launcher job may be about to end.
            _retry(lambda _: listener.bind(self._name), timeout, is_in_use)
        except TimeoutError:
            listener.close()
            raise
        listener.listen(self._size)
        listener.settimeout(timeout)
        self._listener = listener
        threading.Thread(
            target=self._hand_out, args=(listener, offer), name="horovod-bootstrap", daemon=True
        ).start()

    def _hand_out(self, listener: socket.socket, offer: str) -> None:
        """Give the offer to every rank that connects, until all have it or time is up."""
        served: set[int] = set()
        with listener:
            while len(served) < self._size - 1 and not self._finished:
                try:
                    peer, _ = listener.accept()
                except OSError:  # nobody came in time
                    return
                with peer, contextlib.suppress(OSError, ValueError):
                    peer.settimeout(1.0)
                    check_same_user(peer)
                    rank = int(peer.recv(64) or b"-1")
                    if 0 < rank < self._size:
                        peer.sendall(offer.encode())
                        served.add(rank)

    def fetch(self, timeout: float) -> str:
        return _retry(
            self._ask, timeout, f"rank 0 does not listen at the local socket {self.where}"
        )

    def _ask(self, timeout: float) -> str:
        """Connect to rank 0 and return its offer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            sock.connect(self._name)
            check_same_user(sock)
            sock.sendall(b"%d" % self._rank)
            text = b""
            while chunk := sock.recv(_MAX_OFFER):
                text += chunk
            return _check_offer(text.decode())

    def finish(self) -> None:
        self._finished = True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as waker:
            waker.settimeout(1.0)
            waker.connect(self._name)  # wakes the thread that accepts, which sees the flag

    def forget_after_fork(self) -> None:
        if self._listener is not None:
            self._listener.close()


def launcher_process() -> str:
    """Return a name for the launcher's process, or for our parent where no launcher is known.

    Some MPI launchers give the job no name. Their ranks on one host still have one common ancestor,
    whose process id and start time name the job there.
    """
    pid = os.getppid()
    while pid > 1:
        process = _read_process(pid)
        if process is None:
            break
        name, parent, started = process
        if name in _LAUNCHERS:
            return f"{pid}.{started}"
        pid = parent
    process = _read_process(os.getppid())
    return f"{os.getppid()}.{process[2] if process else 0}"


def _read_process(pid: int) -> tuple[str, int, int] | None:
    """Return name, parent and start time of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may itself contain spaces and parentheses.
    before, _, after = text.rpartition(")")
    fields = after.split()
    return before.partition("(")[2], int(fields[1]), int(fields[19])


class SharedFile(Bootstrap):
    """A file in a directory that all hosts see; only this user can read it."""

    def __init__(self, job: str, directory: Path) -> None:
        name = hashlib.sha256(job.encode()).hexdigest()[:32]
        self._path = directory / f"{name}.json"
        self.where = str(self._path)

    def publish(self, offer: str, timeout: float) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written under another name and then renamed, so that no reader sees half an offer.
        draft = self._path.with_suffix(f".{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(offer)
            os.rename(draft, self._path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def fetch(self, timeout: float) -> str:
        return _retry(lambda _: self._read(), timeout, f"rank 0 has not written {self._path}")

    def _read(self) -> str:
        """Return the offer in the file; raise if others could have written it."""
        descriptor = os.open(self._path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise PermissionError("others can write or read this file")
            return _check_offer(file.read(_MAX_OFFER + 1))

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


class StoreOfTorch(Bootstrap):
    """torch's own TCPStore, which torchrun's agent serves, or rank 0 where there is no agent."""

    def __init__(self, address: str, port: int, job: str, serve: bool, timeout: float) -> None:
        dist: Any = importlib.import_module("torch.distributed")
        self.where = f"MASTER_ADDR={address}, MASTER_PORT={port}"
        if not serve:
            _await_listener(address, port, timeout)
        # Multi-tenant: the user's own init_process_group("env://") may share the port with us.
        self._store: Any = dist.TCPStore(
            address,
            port,
            is_master=serve,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        self._key = f"horovod/{job}/offer"

    def publish(self, offer: str, timeout: float) -> None:
        self._store.set(self._key, offer)

    def fetch(self, timeout: float) -> str:
        try:
            self._store.wait([self._key], datetime.timedelta(seconds=timeout))
            return _check_offer(self._store.get(self._key).decode())
        except (RuntimeError, ValueError) as error:  # torch's DistStoreError is a RuntimeError
            raise TimeoutError(f"rank 0 has not written to torch's TCPStore ({error})") from error

    def finish(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(self._key)  # the offer has the job's key: hide it again


def _await_listener(address: str, port: int, timeout: float) -> None:
    """Wait until somebody listens at an address, or time is up.

    torch's client would wait half a second and more between two attempts. If nobody ever listens,
    torch's client is left to say what is wrong.
    """

    def connect(left: float) -> None:
        socket.create_connection((address, port), max(left, 0.1)).close()

    with contextlib.suppress(TimeoutError):
        _retry(connect, timeout, "nobody listens")


class MpiBroadcast(Bootstrap):
    """A broadcast on COMM_WORLD of mpi4py. MPI stays initialised until the process ends."""

    where = "MPI's COMM_WORLD"

    def __init__(self, world: Any) -> None:
        self._world = world
        self._offer = ""

    @classmethod
    def create(cls, rank: int, size: int, threads: bool) -> MpiBroadcast | None:
        """Return this way, or None where mpi4py is missing or belongs to another MPI.

        Args:
            rank: Our rank, as the launcher says.
            size: The number of ranks, as the launcher says.
            threads: Whether to initialise MPI for several threads.
        """
        try:
            world = mpi.initialise(threads).COMM_WORLD
        except Exception as error:  # a wrong MPI library shows itself in many ways
            get_logger(__name__).debug("mpi4py is not usable: %s", error)
            return None
        if (world.rank, world.size) != (rank, size):
            get_logger(__name__).warning(
                "mpi4py says rank %d of %d where the launcher says %d of %d: it was built for "
                "another MPI and is not used",
                world.rank,
                world.size,
                rank,
                size,
            )
            return None
        return cls(world)

    def publish(self, offer: str, timeout: float) -> None:
        buffer = bytearray(offer.encode().ljust(_MAX_OFFER))
        self._broadcast(buffer, timeout)

    def fetch(self, timeout: float) -> str:
        if not self._offer:
            buffer = bytearray(_MAX_OFFER)
            self._broadcast(buffer, timeout)
            self._offer = _check_offer(buffer.decode().strip())
        return self._offer

    def _broadcast(self, buffer: bytearray, timeout: float) -> None:
        """Broadcast rank 0's buffer to all ranks."""
        deadline = time.monotonic() + timeout
        # A communicator of our own: the program's collectives on COMM_WORLD are not disturbed.
        communicator, request = self._world.Idup()
        self._finish(request, deadline)
        self._finish(communicator.Ibcast(buffer, root=0), deadline)
        communicator.Free()

    @staticmethod
    def _finish(request: Any, deadline: float) -> None:
        """Wait for a request, but not beyond the deadline."""
        while not request.Test():  # unlike a wait, this leaves room for a deadline
            if time.monotonic() >= deadline:
                raise TimeoutError("not all ranks took part in the broadcast over MPI")
            time.sleep(_PAUSE / 10)


class FixedAddress(Bootstrap):
    """No passing: every rank knows the address and the key from its environment."""

    def __init__(self, address: str, port: int) -> None:
        self.where = f"MASTER_ADDR={address}, MASTER_PORT={port}"
        self._offer = json.dumps({"address": address, "port": port})

    def publish(self, offer: str, timeout: float) -> None:
        """Do nothing, for all ranks know the offer."""

    def fetch(self, timeout: float) -> str:
        return self._offer
