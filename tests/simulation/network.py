"""Links between simulated hosts, and the sockets at their ends.

A connection delivers bytes in order, late, and not at all while the link between its hosts is cut
in that direction or the other host is down: then they wait, as TCP sends again. A process that ends
closes its connections. A host that loses its power says nothing, and answers with a reset once it
is up again. A kernel asks the other end of an idle connection whether it is still there, if the
program wanted that (SO_KEEPALIVE).
"""

from __future__ import annotations

import errno
import itertools
import select as real_select
import socket as real_socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.world import Task, World

if TYPE_CHECKING:
    from tests.simulation.connections import Selector
    from tests.simulation.processes import Host, Process

_FIN, _RST = b"\0FIN", b"\0RST"  # objects that are compared by identity
LOOPBACK = "127.0.0.1"
_RESETS = struct.pack("ii", 1, 0)  # what SO_LINGER says where closing resets the connection
_TCP_INFO = struct.Struct("=2xBB52xI")  # repetitions, questions, milliseconds since an answer
_DONTWAIT = int(real_socket.MSG_DONTWAIT)
_PEEK = int(real_socket.MSG_PEEK)
_RDHUP = getattr(real_select, "POLLRDHUP", 0)


class Network:
    """All links and listening sockets."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hosts: dict[str, Host] = {}  # by name and by address
        self.listeners: dict[tuple[str, int], Socket] = {}  # by the host's name and the port
        self._cut: Counter[tuple[str, str, bool]] = Counter()  # from a host to another: for agents?
        self._cut_since: dict[tuple[str, str, bool], float] = {}
        self._held: list[Callable[[], None]] = []  # deliveries that wait for a link
        self._slow: dict[str, float] = {}
        self.start_program: Callable[..., Process] | None = None  # what `Host.launch` does
        self._ports = itertools.count(30000)
        self._pids = itertools.count(100)

    def add_host(self, host: Host) -> str:
        """Take a host into the network, and return its address."""
        address = f"10.0.0.{len(self.hosts) // 2 + 1}"
        self.hosts[host.name] = self.hosts[address] = host
        return address

    def cut(self, source: str, target: str, *, spares_agents: bool = False) -> None:
        """Let nothing pass from one host to another, until `heal`.

        The connection to an agent may have a network of its own, and be spared.
        """
        for of_agent in (False, True)[: 1 + (not spares_agents)]:
            self._cut[source, target, of_agent] += 1
            self._cut_since.setdefault((source, target, of_agent), self.world.now)
        for name in (source, target):
            for process in self.hosts[name].processes:
                process.ask_peers()

    def heal(self, source: str, target: str, *, spares_agents: bool = False) -> None:
        """Take a cut back: if it was the only one, the link works again."""
        for of_agent in (False, True)[: 1 + (not spares_agents)]:
            self._cut[source, target, of_agent] -= 1
            if not self._cut[source, target, of_agent]:
                del self._cut_since[source, target, of_agent]
                self.send_again()

    def send_again(self) -> None:
        """Try once more to deliver everything that waits."""
        held, self._held = self._held, []
        for deliver in held:
            self.world.later(self.world.random.uniform(0.0, 1.0), deliver)

    def is_cut(self, source: Host, target: Host, *, of_agent: bool = False) -> bool:
        return (source.name, target.name, of_agent) in self._cut_since

    def cut_since(self, source: Host, target: Host) -> float | None:
        return self._cut_since.get((source.name, target.name, False))

    def break_connections(self, host: Host) -> None:
        """Reset all connections of a host with others, as a firewall that forgets them does."""
        for process in host.processes:
            for sock in list(process.descriptors.values()):
                if isinstance(sock, Socket) and sock.peer and sock.peer.process.host is not host:
                    sock.reset()

    def silent_since(self, host: Host, other: Host) -> float | None:
        """Return since when a host has had no answer of another; None if it gets answers."""
        since = [other.down_since] if other.is_down else []
        pairs = (host.name, other.name, False), (other.name, host.name, False)
        since += [self._cut_since[pair] for pair in pairs if pair in self._cut_since]
        return min(since, default=None)

    def resolve(self, name: str, asking: Host) -> Host:
        """Return the host that has this name or address, as seen from a host."""
        return asking if name == LOOPBACK else self.hosts[name]

    def set_delay(self, host: str, seconds: float) -> None:
        self._slow[host] = seconds

    def delay(self, source: Host, target: Host) -> float:
        """Return the seconds that some bytes take."""
        draw = self.world.random.random
        if source is target:
            return 1e-5 + (1e-4 - 1e-5) * draw()
        slow = self._slow
        more = slow.get(source.name, 0.0) + slow.get(target.name, 0.0) if slow else 0.0
        return 1e-4 + (2e-3 - 1e-4) * draw() + more * draw()

    def wait_for_link(self, deliver: Callable[[], None]) -> None:
        self._held.append(deliver)

    def new_port(self) -> int:
        return next(self._ports)

    def new_pid(self) -> int:
        return next(self._pids)


class Socket:
    """`socket.socket`, as far as the code under test uses one."""

    of_agent = False  # whether it connects the launcher with an agent

    def __init__(self, process: Process, *kind: int) -> None:
        """Make one of this kind: a family, and a type that is SOCK_STREAM by default."""
        self._is_stream = kind[1:2] != (real_socket.SOCK_DGRAM,)
        self.process = process
        self._world = process.world
        self.peer: Socket | None = None
        self.name: tuple[str, int] = ("", 0)
        self.backlog: deque[Socket] | None = None  # of one that listens
        self.is_closed = False
        self._fd = process.new_descriptor(self)
        self._inbox = b""
        self._at_end = False  # the peer has said that nothing follows
        self._error: OSError | None = None
        self._timeout: float | None = None
        self._waiting: dict[Task, int] = {}  # which of `events` each thread waits for
        self.selectors: dict[Selector, int] = {}  # that it is registered with, and its number there
        self._outbox: deque[bytes] = deque()
        self._is_sending = False
        self._has_shut = False  # this end has said that nothing follows
        self._options: dict[tuple[int, int], Any] = {}

    # -- what the code under test calls -----------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.is_closed else self._fd

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        self._options[level, option] = value

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return the kernel's facts about a connection (TCP_INFO): whether the peer answers."""
        since = self._silent_since()
        is_silent = since is not None and self._world.now - since > 1.0
        milliseconds = int(1000 * (self._world.now - (since or 0.0))) if is_silent else 0
        return _TCP_INFO.pack(is_silent, is_silent, milliseconds)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def getsockname(self) -> tuple[str, int]:
        return self.name

    def getpeername(self) -> tuple[str, int]:
        assert self.peer is not None
        return self.peer.name

    def bind(self, address: tuple[str, int]) -> None:
        """Take one of the host's own addresses."""
        host = self.process.host
        if address[0] not in (LOOPBACK, host.address, "0.0.0.0"):
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        self.name = address[0], address[1] or host.network.new_port()

    def connect(self, address: tuple[str, int]) -> None:
        """Connect: refused where nobody listens, in vain where the way there or back is cut."""
        process, network = self.process, self.process.host.network
        host, target = process.host, network.resolve(address[0], process.host)
        world = process.world
        self.name = host.address, network.new_port()
        if not self._is_stream:
            return  # only which address leads there is asked
        deadline = None if self._timeout is None else world.now + self._timeout
        pause = 2 * network.delay(host, target)
        while True:
            left = None if deadline is None else deadline - world.now
            if left is not None and left <= 0:
                raise TimeoutError("timed out")
            world.park(f"a connection to {address[0]}", pause if left is None else min(pause, left))
            cut = network.is_cut(host, target) or network.is_cut(target, host)
            if not cut and not target.is_down:
                break
            pause = 1.0  # the kernel tries again
        listener = network.listeners.get((target.name, address[1]))
        if listener is None or listener.backlog is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        theirs = Socket(listener.process)
        self.peer, theirs.peer = theirs, self
        theirs.name = listener.name
        listener.backlog.append(theirs)
        listener._wake()

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        assert self.backlog is not None
        self._check_open()
        self._wait_until(lambda: bool(self.backlog), "a connection")
        found = self.backlog.popleft()
        return found, found.getpeername()

    def recv(self, most: int, flags: int = 0) -> bytes:
        self._check_open()
        self._world.pause()
        if not self._inbox:
            self._wait_until(self.is_readable, "bytes", flags)
            if self._error is not None and not self._inbox:
                error, self._error, self._at_end = self._error, None, True
                raise error
        inbox = self._inbox
        if not flags & _PEEK:
            self._inbox = inbox[most:]
        return inbox[:most]

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(len(view), flags)
        view[: len(data)] = data
        return len(data)

    def recvmsg_into(self, buffers: list[Any], _: int, flags: int) -> tuple[int, Any, int, Any]:
        views = [memoryview(each).cast("B") for each in buffers]
        data = self.recv(sum(map(len, views)), flags)
        taken = 0
        for view in views:
            piece = data[taken : taken + len(view)]
            view[: len(piece)] = piece
            taken += len(piece)
        return taken, [], 0, None

    def send(self, data: bytes | memoryview) -> int:
        self._check_open()
        self._world.pause()
        if self._error is not None or self.peer is None or self._has_shut:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._transmit(bytes(data))
        return len(data)

    def sendall(self, data: bytes | memoryview) -> None:
        self.send(data)

    def sendmsg(self, buffers: list[Any], *_: Any) -> int:
        return self.send(b"".join(buffers))

    def shutdown(self, how: int) -> None:
        self._check_open()
        if how in (real_socket.SHUT_WR, real_socket.SHUT_RDWR) and not self._has_shut:
            self._has_shut = True
            self._transmit(_FIN)
        if how in (real_socket.SHUT_RD, real_socket.SHUT_RDWR):
            self._at_end = True
            self._wake()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.process.descriptors.pop(self._fd, None)
        if self.backlog is not None:
            self._forget_listener()
            for connection in self.backlog:
                connection._transmit(_RST)
        elif self.peer is not None:
            lingers = self._options.get((real_socket.SOL_SOCKET, real_socket.SO_LINGER))
            resets = self._inbox or lingers == _RESETS
            if resets or not self._has_shut:
                self._transmit(_RST if resets else _FIN)
        self._wake()

    def reset(self) -> None:
        """Break the connection at both ends; what is on its way is lost."""
        for end in (self, self.peer):
            if end is not None and not end.is_closed:
                end._outbox.clear()
                end._receive(_RST)

    def vanish(self) -> None:
        """Be gone without a word, as the host has lost its power: what was to be sent is lost."""
        self.is_closed = True
        self._outbox.clear()
        self._forget_listener()

    def _forget_listener(self) -> None:
        if self.backlog is not None:
            key = self.process.host.name, self.name[1]
            self.process.host.network.listeners.pop(key, None)

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- waiting ----------------------------------------------------------------------------

    def is_readable(self) -> bool:
        return bool(self._inbox or self._at_end or self._error or self.backlog or self.is_closed)

    def is_writable(self) -> bool:
        return True

    def events(self) -> int:
        """Return what `poll` says about it."""
        found = 0
        if self._inbox or self._at_end or self._error or self.backlog or self.is_closed:
            found = real_select.POLLIN  # as `is_readable` says, without a call
        if self.peer is not None:
            found |= real_select.POLLOUT
            found |= _RDHUP if self._at_end else 0
            found |= real_select.POLLHUP if self._at_end and self._has_shut else 0
        if self._error is not None:
            found |= real_select.POLLERR | real_select.POLLHUP
        return found

    # -- whether the peer is still there ----------------------------------------------------

    def _silent_since(self) -> float | None:
        """Return since when the peer's kernel has not answered; None if it does."""
        if self.peer is None or self._error is not None:
            return None
        host = self.process.host
        return host.network.silent_since(host, self.peer.process.host)

    def ask_peer(self) -> None:
        """Ask the peer's kernel, from now on, whether it still knows this connection."""
        if (real_socket.SOL_SOCKET, real_socket.SO_KEEPALIVE) in self._options:
            idle, interval, count = (
                self._options.get((real_socket.IPPROTO_TCP, option), default)
                for option, default in (
                    (real_socket.TCP_KEEPIDLE, 7200),
                    (real_socket.TCP_KEEPINTVL, 75),
                    (real_socket.TCP_KEEPCNT, 9),
                )
            )
            patience = idle + interval * count
            self._world.later(patience, self._hear_answer, patience)

    def _hear_answer(self, patience: float) -> None:
        since = self._silent_since()
        if self.is_closed or self.peer is None or self._error is not None:
            return
        if since is not None and self._world.now - since >= patience:
            self._error = TimeoutError(errno.ETIMEDOUT, "Connection timed out")
            self._wake()
        elif since is None and self.peer.process.is_gone and not self._at_end:
            self._receive(_RST)  # its host has started again, and knows nothing of us

    def watch(self, task: Task, events: int) -> None:
        """Wake this thread when one of these events is there."""
        self._waiting[task] = events

    def unwatch(self, task: Task) -> None:
        self._waiting.pop(task, None)

    def _wake(self) -> None:
        if self._waiting:
            found = self.events()
            for task in [task for task, events in self._waiting.items() if events & found]:
                del self._waiting[task]
                self._world.wake(task)
        if self.selectors:
            for selector in self.selectors:
                selector.notice(self._fd)

    def _check_open(self) -> None:
        if self.is_closed:  # as are all of a process that is gone
            self._world.running()
            raise OSError(errno.EBADF, "Bad file descriptor")

    def _wait_until(self, is_there: Callable[[], bool], what: str, flags: int = 0) -> None:
        if is_there():
            return
        if self._timeout == 0.0 or flags & _DONTWAIT:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        world, left = self._world, self._timeout
        task, deadline = world.running(), None if left is None else world.now + left
        while left is None or left > 0:
            self._waiting[task] = real_select.POLLIN
            world.park((what, "from", self.peer and self.peer.process), left)
            self._waiting.pop(task, None)
            if is_there():
                return
            left = None if deadline is None else deadline - world.now
        raise TimeoutError("timed out")

    # -- delivery ---------------------------------------------------------------------------

    def _transmit(self, data: bytes) -> None:
        self._outbox.append(data)
        if not self._is_sending:
            self._is_sending = True
            self._schedule()

    def _schedule(self) -> None:
        assert self.peer is not None
        host = self.process.host
        self._world.later(host.network.delay(host, self.peer.process.host), self._deliver)

    def _deliver(self) -> None:
        """The first that is on its way arrives, or waits for the link."""
        peer, host = self.peer, self.process.host
        assert peer is not None
        other = peer.process.host
        if host.is_down or not self._outbox:  # it never left
            self._outbox.clear()
            self._is_sending = False
            return
        if host.network.is_cut(host, other, of_agent=self.of_agent) or other.is_down:
            host.network.wait_for_link(self._deliver)
            return
        data = self._outbox.popleft()
        peer._receive(data)
        if self._outbox:
            self._schedule()
        else:
            self._is_sending = False

    def _receive(self, data: bytes) -> None:
        if data is _RST:
            self._error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        elif self.is_closed:
            if data is not _FIN:
                self._transmit(_RST)
        elif data is _FIN:
            self._at_end = True
        else:
            self._inbox += data
        self._wake()
