"""What `socket`, `select` and `selectors` are inside of a simulated process."""

from __future__ import annotations

import select as real_select
import selectors as real_selectors
import socket as real_socket
from collections import deque
from typing import TYPE_CHECKING, Any

from tests.simulation.network import LOOPBACK, Socket
from tests.simulation.world import Task

if TYPE_CHECKING:
    from tests.simulation.processes import Process


class SocketModule:
    """`socket`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.socket = lambda *kind: Socket(process, *kind)

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
        network.listeners[self._process.host.name, listener.name[1]] = listener
        return listener

    def create_connection(self, address: tuple[str, int], timeout: float | None = None) -> Socket:
        sock = Socket(self._process)
        sock.settimeout(timeout)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock

    def getaddrinfo(self, name: Any, port: Any = None, *_: Any, **__: Any) -> list[Any]:
        text = name.decode() if isinstance(name, bytes) else name
        hosts = self._process.host.network.hosts
        if text not in hosts and text != LOOPBACK:
            raise real_socket.gaierror(real_socket.EAI_NONAME, "Name or service not known")
        address = text if text == LOOPBACK else hosts[text].address
        return [(real_socket.AF_INET, real_socket.SOCK_STREAM, 6, "", (address, port or 0))]

    def if_nameindex(self) -> list[tuple[int, str]]:
        return [(1, "lo"), (2, "eth0")]


class Selector:
    """`selectors.DefaultSelector`. It looks only at sockets that may have become ready."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._keys: dict[int, real_selectors.SelectorKey] = {}
        self._candidates: dict[int, None] = {}  # in the order in which they changed
        self._task: Task | None = None  # the thread that waits

    def register(self, fileobj: Any, events: int, data: Any = None) -> None:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fd] = real_selectors.SelectorKey(fileobj, fd, events, data)
        self._candidates[fd] = None
        if fd in self._process.descriptors:
            self._process.descriptors[fd].selectors[self] = fd

    def modify(self, fileobj: Any, events: int, data: Any = None) -> None:
        self.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> None:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fd not in self._keys:  # closed before: find it by the object
            found = [number for number, key in self._keys.items() if key.fileobj is fileobj]
            if not found:
                raise KeyError(fileobj)
            (fd,) = found
        del self._keys[fd]
        if fd in self._process.descriptors:
            self._process.descriptors[fd].selectors.pop(self, None)

    def get_map(self) -> dict[int, real_selectors.SelectorKey]:
        return self._keys

    def notice(self, fd: int) -> None:
        """Something has happened on a socket."""
        self._candidates[fd] = None
        if self._task is not None:
            self._process.world.wake(self._task)

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        world = self._process.world
        deadline = None if timeout is None else world.now + timeout
        world.pause()
        while True:
            ready = self._find_ready()
            left = None if deadline is None else deadline - world.now
            if ready or (left is not None and left <= 0):
                if len(ready) > 1:
                    world.random.shuffle(ready)
                return ready
            self._task = world.running()
            world.park("something to do", left)
            self._task = None

    def _find_ready(self) -> list[tuple[Any, int]]:
        ready = []
        for fd in list(self._candidates):
            found, key = self._process.descriptors.get(fd), self._keys.get(fd)
            events = 0
            if found is not None and key is not None:
                if found.is_writable():
                    events |= key.events & real_selectors.EVENT_WRITE
                if found.is_readable():
                    events |= key.events & real_selectors.EVENT_READ
            if events:
                ready.append((key, events))
            else:
                del self._candidates[fd]
        return ready

    def close(self) -> None:
        for fd in self._keys:
            if fd in self._process.descriptors:
                self._process.descriptors[fd].selectors.pop(self, None)
        self._keys.clear()


class Poll:
    """`select.poll`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._wanted: dict[int, int] = {}

    def register(self, fileobj: Any, events: int) -> None:
        self._wanted[fileobj if isinstance(fileobj, int) else fileobj.fileno()] = events

    def unregister(self, fileobj: Any) -> None:
        del self._wanted[fileobj if isinstance(fileobj, int) else fileobj.fileno()]

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        world, descriptors = self._process.world, self._process.descriptors
        always = real_select.POLLERR | real_select.POLLHUP
        deadline = None if milliseconds is None else world.now + milliseconds / 1000
        world.pause()
        while True:
            watched, ready = {}, []
            for fd, wanted in self._wanted.items():
                sock = descriptors.get(fd)
                if sock is not None:
                    watched[sock] = wanted | always
                    events = sock.events() & watched[sock]
                    if events:
                        ready.append((fd, events))
            left = None if deadline is None else deadline - world.now
            if ready or (left is not None and left <= 0):
                if len(ready) > 1:
                    world.random.shuffle(ready)
                return ready
            task = world.running()
            for sock, wanted in watched.items():
                sock.watch(task, wanted)
            world.park("something to happen on a connection", left)
            for sock in watched:
                sock.unwatch(task)


class SelectModule:
    """`select`."""

    def __init__(self, process: Process) -> None:
        self.poll = lambda: Poll(process)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_select, name)


class SelectorsModule:
    """`selectors`."""

    def __init__(self, process: Process) -> None:
        self.DefaultSelector = lambda: Selector(process)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_selectors, name)
