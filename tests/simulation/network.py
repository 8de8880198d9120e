"""Links between simulated hosts, and what `socket` and `selectors` are inside of a process.

A connection delivers bytes in order, late, and not at all while the link between its hosts is cut
in that direction: then they wait, as TCP sends again. A process that ends closes its connections; a
host that loses its power says nothing, and answers with a reset once it is up again.
"""

from __future__ import annotations

import errno
import itertools
import selectors as real_selectors
import socket as real_socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.world import Task, World

if TYPE_CHECKING:
    from tests.simulation.processes import Host, Process

_FIN, _RST = b"\0FIN", b"\0RST"  # objects that are compared by identity


class Network:
    """All links and listening sockets."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[tuple[str, int], Socket] = {}
        self._cut: set[tuple[str, str]] = set()  # from one host to another
        self._held: list[Callable[[], None]] = []  # deliveries that wait for a link
        self._slow: dict[str, float] = {}
        self._ports = itertools.count(30000)
        self._pids = itertools.count(100)

    def cut(self, source: str, target: str) -> None:
        self._cut.add((source, target))

    def heal(self) -> None:
        """All links work again."""
        self._cut.clear()
        held, self._held = self._held, []
        for deliver in held:
            self.world.later(self.world.random.uniform(0.0, 1.0), deliver)

    def is_cut(self, source: Host, target: Host) -> bool:
        return (source.name, target.name) in self._cut

    def set_delay(self, host: str, seconds: float) -> None:
        self._slow[host] = seconds

    def delay(self, source: Host, target: Host) -> float:
        """Return the seconds that some bytes take."""
        if source is target:
            return self.world.random.uniform(1e-5, 1e-4)
        slow = self._slow.get(source.name, 0.0) + self._slow.get(target.name, 0.0)
        return self.world.random.uniform(1e-4, 2e-3) + slow * self.world.random.random()

    def wait_for_link(self, deliver: Callable[[], None]) -> None:
        self._held.append(deliver)

    def new_port(self) -> int:
        return next(self._ports)

    def new_pid(self) -> int:
        return next(self._pids)


class Socket:
    """`socket.socket`, as far as the code under test uses one."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.peer: Socket | None = None
        self.name: tuple[str, int] = ("", 0)
        self.backlog: deque[Socket] | None = None  # of one that listens
        self.is_closed = False
        self._fd = process.new_descriptor(self)
        self._inbox = bytearray()
        self._at_end = False  # the peer has said that nothing follows
        self._error: OSError | None = None
        self._timeout: float | None = None
        self._waiting: list[Task] = []
        self._outbox: deque[bytes] = deque()
        self._is_sending = False

    # -- what the code under test calls -----------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.is_closed else self._fd

    def setsockopt(self, *_: object) -> None:
        """Options make no difference here."""

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def getsockname(self) -> tuple[str, int]:
        return self.name

    def getpeername(self) -> tuple[str, int]:
        assert self.peer is not None
        return self.peer.name

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        assert self.backlog is not None
        self._check_open()
        self._wait_until(lambda: bool(self.backlog), "a connection")
        found = self.backlog.popleft()
        return found, found.getpeername()

    def recv(self, most: int) -> bytes:
        self._check_open()
        self.process.world.pause()
        self._wait_until(self.is_readable, "bytes")
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        data = bytes(self._inbox[:most])
        del self._inbox[:most]
        return data

    def send(self, data: bytes | memoryview) -> int:
        self._check_open()
        self.process.world.pause()
        if self._error is not None or self.peer is None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._transmit(bytes(data))
        return len(data)

    def sendall(self, data: bytes | memoryview) -> None:
        self.send(data)

    def shutdown(self, how: int) -> None:
        self._check_open()
        if how in (real_socket.SHUT_WR, real_socket.SHUT_RDWR):
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
            self.process.host.network.listeners.pop(self.name, None)
            for connection in self.backlog:
                connection._transmit(_RST)
        elif self.peer is not None:
            self._transmit(_RST if self._inbox else _FIN)
        self._wake()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- waiting ----------------------------------------------------------------------------

    def is_readable(self) -> bool:
        return bool(self._inbox or self._at_end or self._error or self.backlog or self.is_closed)

    def watch(self, task: Task) -> None:
        """Wake this thread when something changes."""
        self._waiting.append(task)

    def unwatch(self, task: Task) -> None:
        if task in self._waiting:
            self._waiting.remove(task)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self.process.world.wake(task)

    def _check_open(self) -> None:
        self.process.world.running()
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def _wait_until(self, is_there: Callable[[], bool], what: str) -> None:
        world = self.process.world
        deadline = None if self._timeout is None else world.now + self._timeout
        while not is_there():
            if self._timeout == 0.0:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            left = None if deadline is None else deadline - world.now
            if left is not None and left <= 0:
                raise TimeoutError("timed out")
            task = world.running()
            self.watch(task)
            world.park(f"{what} from {self.peer and self.peer.process}", left)
            self.unwatch(task)

    # -- delivery ---------------------------------------------------------------------------

    def _transmit(self, data: bytes) -> None:
        self._outbox.append(data)
        if not self._is_sending:
            self._is_sending = True
            self._schedule()

    def _schedule(self) -> None:
        assert self.peer is not None
        host, other = self.process.host, self.peer.process.host
        host.network.world.later(host.network.delay(host, other), self._deliver)

    def _deliver(self) -> None:
        """The first that is on its way arrives, or waits for the link."""
        peer, host = self.peer, self.process.host
        assert peer is not None
        other = peer.process.host
        if host.is_down:  # it never left
            self._outbox.clear()
            self._is_sending = False
            return
        if host.network.is_cut(host, other):
            host.network.wait_for_link(self._deliver)
            return
        data = self._outbox.popleft()
        if not other.is_down:
            peer._receive(data)
        if self._outbox:
            self._schedule()
        else:
            self._is_sending = False

    def _receive(self, data: bytes) -> None:
        if data is _RST:
            self._error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        elif data is _FIN:
            self._at_end = True
        elif self.is_closed:
            self._transmit(_RST)
        else:
            self._inbox += data
        self._wake()


class SocketModule:
    """`socket`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.socket = Socket

    def __getattr__(self, name: str) -> Any:
        return getattr(real_socket, name)

    def gethostname(self) -> str:
        return self._process.host.name

    def socketpair(self) -> tuple[Socket, Socket]:
        one, other = Socket(self._process), Socket(self._process)
        one.peer, other.peer = other, one
        return one, other

    def create_server(self, address: tuple[str, int], **_: Any) -> Socket:
        network = self._process.host.network
        listener = Socket(self._process)
        listener.name = address[0], address[1] or network.new_port()
        listener.backlog = deque()
        network.listeners[listener.name] = listener
        return listener

    def create_connection(self, address: tuple[str, int], timeout: float | None = None) -> Socket:
        """Connect: refused where nobody listens, in vain where the way there or back is cut."""
        process, network = self._process, self._process.host.network
        host, target = process.host, process.host.cluster[address[0]]
        world = process.world
        deadline = None if timeout is None else world.now + timeout
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
        listener = network.listeners.get(tuple(address))  # type: ignore[arg-type]
        if listener is None or listener.backlog is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        ours, theirs = Socket(process), Socket(listener.process)
        ours.peer, theirs.peer = theirs, ours
        ours.name, theirs.name = (host.name, network.new_port()), listener.name
        ours.settimeout(timeout)
        listener.backlog.append(theirs)
        listener._wake()
        return ours


class Selector:
    """`selectors.DefaultSelector`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._keys: dict[int, real_selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> None:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fd] = real_selectors.SelectorKey(fileobj, fd, events, data)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> None:
        self.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> None:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fd in self._keys:
            del self._keys[fd]
        else:  # closed before: find it by the object
            found = [number for number, key in self._keys.items() if key.fileobj is fileobj]
            if not found:
                raise KeyError(fileobj)
            del self._keys[found[0]]

    def get_map(self) -> dict[int, real_selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        world, descriptors = self._process.world, self._process.descriptors
        deadline = None if timeout is None else world.now + timeout
        world.pause()
        while True:
            ready = []
            for fd, key in self._keys.items():
                found = descriptors.get(fd)
                events = key.events & real_selectors.EVENT_WRITE
                if found is not None and found.is_readable():
                    events |= key.events & real_selectors.EVENT_READ
                if found is not None and events:
                    ready.append((key, events))
            left = None if deadline is None else deadline - world.now
            if ready or (left is not None and left <= 0):
                world.random.shuffle(ready)
                return ready
            task = world.running()
            watched = [descriptors[fd] for fd in self._keys if fd in descriptors]
            for each in watched:
                each.watch(task)
            world.park("something to do", left)
            for each in watched:
                each.unwatch(task)

    def close(self) -> None:
        self._keys.clear()


class SelectorsModule:
    """`selectors`."""

    def __init__(self, process: Process) -> None:
        self.DefaultSelector = lambda: Selector(process)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_selectors, name)
