"""Pipes between simulated processes, and what else a descriptor may lead to."""

from __future__ import annotations

import errno
import select as real_select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.world import Task, World

if TYPE_CHECKING:
    from tests.simulation.connections import Selector
    from tests.simulation.processes import Process

_ROOM = 1 << 16  # bytes that a pipe holds


class File:
    """What a descriptor leads to, perhaps those of several processes; `poll` can wait for it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_blocking = True
        self.references = 0  # descriptors that lead here
        self.selectors: dict[Selector, int] = {}  # that it is registered with, and its number there
        self.callback: Callable[[], None] | None = None  # of a kernel, for any change
        self._waiting: dict[Task, int] = {}

    def events(self) -> int:
        """Return what `poll` says about it."""
        raise NotImplementedError

    def is_readable(self) -> bool:
        return bool(self.events() & (real_select.POLLIN | real_select.POLLHUP))

    def is_writable(self) -> bool:
        return bool(self.events() & (real_select.POLLOUT | real_select.POLLERR))

    def watch(self, task: Task, events: int) -> None:
        """Wake this thread when one of these events is there."""
        self._waiting[task] = events

    def unwatch(self, task: Task) -> None:
        self._waiting.pop(task, None)

    def wake(self) -> None:
        """Tell everybody who waits that something has changed."""
        found = self.events()
        for task in [task for task, events in self._waiting.items() if events & found]:
            del self._waiting[task]
            self.world.wake(task)
        for selector, number in list(self.selectors.items()):
            selector.notice(number)
        if self.callback is not None:
            self.callback()

    def wait(self, events: int, what: str) -> None:
        """Let the running thread wait for one of these events."""
        while not self.events() & events:
            task = self.world.running()
            self.watch(task, events)
            self.world.park(what)
            self.unwatch(task)

    def close(self) -> None:
        """Take one descriptor away."""
        self.references -= 1
        if self.references == 0:
            self.vanish()

    def vanish(self) -> None:
        """Be gone: no descriptor leads here any more."""

    def ask_peer(self) -> None:
        """A pipe has no other host at its end."""

    peer = None


class Reader(File):
    """The reading end of a pipe."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.content = bytearray()
        self.writer = Writer(world, self)
        self.is_gone = False

    def events(self) -> int:
        found = real_select.POLLIN if self.content else 0
        return found | (real_select.POLLHUP if self.writer.is_gone else 0)

    def take(self, most: int = 1 << 30) -> bytes:
        """Return what is there; nothing at the end, and now if nothing is there."""
        data = bytes(self.content[:most])
        del self.content[:most]
        if data:
            self.writer.wake()
        return data

    def read(self, most: int) -> bytes:
        if not self.events():
            if not self.is_blocking:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            self.wait(real_select.POLLIN | real_select.POLLHUP, "bytes in a pipe")
        return self.take(most)

    def vanish(self) -> None:
        self.is_gone = True
        self.writer.wake()


class Writer(File):
    """The writing end of a pipe."""

    def __init__(self, world: World, reader: Reader) -> None:
        super().__init__(world)
        self.reader = reader
        self.is_gone = False

    def events(self) -> int:
        found = real_select.POLLOUT if len(self.reader.content) < _ROOM else 0
        return found | (real_select.POLLERR if self.reader.is_gone else 0)

    def put(self, data: bytes) -> None:
        """Write all of it, as a kernel does whose buffers have no end."""
        if data and not self.reader.is_gone and not self.is_gone:
            self.reader.content += data
            self.reader.wake()

    _transmit = put  # a signal's number arrives

    def write(self, data: bytes) -> int:
        while True:
            if self.reader.is_gone:
                raise BrokenPipeError(errno.EPIPE, "Broken pipe")
            room = _ROOM - len(self.reader.content)
            if room > 0:
                piece = bytes(data[:room])
                self.put(piece)
                return len(piece)
            if not self.is_blocking:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            self.wait(real_select.POLLOUT | real_select.POLLERR, "room in a pipe")

    def vanish(self) -> None:
        self.is_gone = True
        self.reader.wake()


def make_pipe(world: World) -> tuple[Reader, Writer]:
    reader = Reader(world)
    return reader, reader.writer


class Pidfd(File):
    """A descriptor that is readable when a process has ended."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.world)
        self._process = process
        process.when_gone.append(self.wake)

    def events(self) -> int:
        return real_select.POLLIN if self._process.is_gone else 0


class Stream:
    """One of the objects `stdin`, `stdout` and `stderr` of a `Popen`."""

    def __init__(self, process: Process, file: File) -> None:
        self._process = process
        self._fd = process.new_descriptor(file)
        self._is_closed = False

    def fileno(self) -> int:
        if self._is_closed:
            raise ValueError("I/O operation on closed file")
        return self._fd

    def read(self, most: int) -> Any:
        return self._process.system["os"].read(self._fd, most)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._process.close_descriptor(self._fd)
