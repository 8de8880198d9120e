"""Accept connections from hosts whose agents the launcher does not start.

A thread accepts connections. A peer that does not prove within seconds that it knows the job's key
is dropped, before anything else that it sends is read. Each host becomes a link, which from then on
belongs to the job that takes it. `JoinServer` and `horovod.spark.task_link` derive from
`LinkServer`.

For ``horovodrun --listen`` `run_job` opens a `JoinServer`, at which hosts arrive by ``horovodrun
--join``. A job with fixed ranks calls `gather` and starts when all its hosts are there; an elastic
job takes them as they come (`join.JoinedHosts`).
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from horovod.common.logging import get_logger
from horovod.common.wire import Session
from horovod.runner.agents.channel import ChannelLink, LinkChannel, unmapped
from horovod.runner.agents.starters import NODE_VARIABLES, check_name
from horovod.runner.slots.hosts import Host, is_local
from horovod.runner.slots.worker_env import HOST_VARIABLES

Link = TypeVar("Link", bound=ChannelLink)

_HANDSHAKE_SECONDS = 10.0
_MOST_PENDING = 256
_MAX_HELLO = 1 << 20
_ACCEPT_PAUSE = 0.1


class LinkServer(ABC, Generic[Link]):
    """Listens on one address, at any free port by default."""

    owner: str
    """The name of the listening program, for the log."""

    def __init__(self, address: str, key: bytes, port: int = 0) -> None:
        self._key = key
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Condition()
        self._links: list[Link] = []
        self._pending: dict[LinkChannel, float] = {}  # with the deadlines of their handshakes
        self._closing = False
        self._rejected = 0
        self._wakeup, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._serve, name="horovod-hosts", daemon=True)
        self._thread.start()

    # -- for the job -----------------------------------------------------------------------

    @abstractmethod
    def make_link(self, channel: LinkChannel, hello: Mapping[str, Any]) -> Link:
        """Make the link to a host that has proved that it knows the key.

        This is called in the server's thread.

        Args:
            channel: The connection.
            hello: The host's first message, with which it describes itself.

        Returns:
            The link, which the job will take from `links`.

        Raises:
            ValueError: If the host cannot take part; also `KeyError` and `TypeError`, which a
                message of another form causes.
        """

    def links(self) -> list[Link]:
        with self._lock:
            return list(self._links)

    def living(self) -> list[Link]:
        """Return the links whose hosts hold their connections."""
        return [link for link in self.links() if link.is_alive]

    def wait(self, seconds: float) -> None:
        """Wait until a host arrives, `wake` is called or the time is over."""
        with self._lock:
            self._lock.wait(seconds)

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with self._lock:
            self._lock.notify_all()

    def close(self) -> None:
        """Accept no more hosts, and let go those that are left."""
        self._closing = True
        self._waker.send(b"\0")
        self._thread.join()
        for link in self._links:
            link.end("done")

    # -- in the thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            first = next(iter(self._pending.values()), None)  # the oldest is the first that is late
            patience = None if first is None else max(0.0, first - time.monotonic())
            for key, _ in self._selector.select(patience):
                key.data()
            now = time.monotonic()
            for channel in [each for each, until in self._pending.items() if until <= now]:
                self._drop(channel)
        for channel in list(self._pending):
            self._drop(channel)
        self._listener.close()
        self._selector.close()
        self._wakeup.close()
        self._waker.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: others may be closed meanwhile
            time.sleep(_ACCEPT_PAUSE)
            return
        channel = LinkChannel(sock, Session(self._key, server=True, max_frame=_MAX_HELLO))
        self._pending[channel] = time.monotonic() + _HANDSHAKE_SECONDS
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._take(channel))
        if len(self._pending) > _MOST_PENDING:
            self._drop(next(iter(self._pending)))

    def _take(self, channel: LinkChannel) -> None:
        if channel not in self._pending:
            return  # it was dropped earlier in this turn of the loop
        try:
            messages = channel.receive()
            channel.flush()
            if messages is None:
                raise ConnectionResetError("it closed the connection")
            link = self.make_link(channel, messages[0].header) if messages else None
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Only the first is a warning, because a stranger could otherwise fill the log.
            level = logging.DEBUG if self._rejected else logging.WARNING
            get_logger().log(
                level, "%s refused a connection from %s: %s", self.owner, _peer(channel), error
            )
            self._rejected += 1
            self._drop(channel)
            return
        if link is not None:
            self._selector.unregister(channel.socket)
            del self._pending[channel]
            with self._lock:
                self._links.append(link)
                self._lock.notify_all()

    def _drop(self, channel: LinkChannel) -> None:
        del self._pending[channel]
        self._selector.unregister(channel.socket)
        channel.close()


def _peer(channel: LinkChannel) -> str:
    try:
        return unmapped(channel.socket.getpeername())
    except OSError:
        return "an address that is gone"


_GLANCE = 1.0  # seconds between looks at whether hosts that have joined are still there
_MOST_SLOTS = 100_000


class JoinedLink(ChannelLink):
    """The link to a host that has joined."""

    own_variables = (*HOST_VARIABLES, *NODE_VARIABLES)
    connection_ended = "horovodrun --join ended there, or its connection did"

    def __init__(self, channel: LinkChannel, name: str, slots: int) -> None:
        super().__init__(channel)
        self.name = name
        self.slots = slots

    @property
    def is_waiting(self) -> bool:
        """Whether the host is there and its agent, if one was started, has not ended."""
        return self._code is None and self.is_alive


class JoinServer(LinkServer[JoinedLink]):
    """The server at which hosts join a job."""

    owner = "horovodrun"

    def __init__(self, address: str, port: int, key: bytes, expected: Sequence[Host]) -> None:
        """Listen for hosts.

        Args:
            address: The address of this machine to listen at.
            port: The port; 0 takes any that is free.
            key: The secret that hosts must know.
            expected: The hosts of the job. Any host may join if all of these are this machine.

        Raises:
            OSError: If it cannot listen at that address and port.
        """
        self._expected = {host.name: host.slots for host in remote_hosts(expected)}
        super().__init__(address, key, port)
        name = socket.gethostname() if address in ("0.0.0.0", "::") else address
        self.address = f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}"

    def make_link(self, channel: LinkChannel, hello: Mapping[str, Any]) -> JoinedLink:
        name, slots = str(hello["host"]), int(hello["slots"])
        check_name(name)
        if not 0 < slots <= _MOST_SLOTS:
            raise ValueError(f"{name} offers {slots} slots")
        why = ""
        if self._expected and name not in self._expected:
            hosts = ", ".join(self._expected)
            why = f"{name} is not among the hosts of this job, which are {hosts}"
        elif name in self.waiting():
            why = f"there is a host {name} in this job already; say another name with -H"
        if why:
            channel.send({"end": "refused", "why": why})
            raise ValueError(why)
        return JoinedLink(channel, name, self._expected.get(name) or slots)

    def waiting(self) -> dict[str, JoinedLink]:
        """Return the hosts that are here, by name, in the order in which they came."""
        return {link.name: link for link in self.links() if link.is_waiting}


def gather(
    server: JoinServer, hosts: Sequence[Host], num_proc: int, timeout: float
) -> dict[str, JoinedLink]:
    """Wait until all hosts of a job with fixed ranks have joined.

    Args:
        server: The server at which they join.
        hosts: The hosts of the job. If all of them are this machine, any hosts are taken until
            there are enough slots.
        num_proc: The number of ranks of the job.
        timeout: Seconds to wait.

    Returns:
        The links of the hosts that are not this machine, by name.

    Raises:
        TimeoutError: If hosts are missing; the message names them.
    """
    deadline = time.monotonic() + timeout
    named = remote_hosts(hosts)
    needed = num_proc - sum(host.slots or 0 for host in hosts if is_local(host.name))
    while True:
        here = server.waiting()
        if named:
            missing = [host.name for host in named if host.name not in here]
            if not missing:
                return {host.name: here[host.name] for host in named}
            problem = f"{', '.join(missing)} did not join"
        else:
            chosen, slots = {}, 0
            for name, link in here.items():
                if slots < needed:
                    chosen[name], slots = link, slots + link.slots
            if slots >= needed:
                return chosen
            came = ", ".join(f"{name}:{link.slots}" for name, link in here.items()) or "nobody"
            problem = f"the job needs {needed} slots of other hosts, and {came} joined"
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{problem} within {timeout:g} s (--start-timeout): run horovodrun --join "
                f"{server.address} there, with the same secret"
            )
        server.wait(min(left, _GLANCE))


def remote_hosts(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts that are not this machine."""
    return [host for host in hosts if not is_local(host.name)]
