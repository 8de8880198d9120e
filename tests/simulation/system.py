"""The system calls of simulated processes: `os`, `subprocess`, and the inner modules of Python.

An agent uses inner modules (`_thread`, `_signal`, `_socket`): they take less time to import.
"""

from __future__ import annotations

import _ctypes
import _thread
import errno
import fcntl
import io
import os as real_os
import resource
import subprocess as real_subprocess
import sys as real_sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from tests.simulation.network import LOOPBACK
from tests.simulation.pipes import File, Pidfd, Stream, make_pipe
from tests.simulation.ssh import SshClient

if TYPE_CHECKING:
    from tests.simulation.modules import Library
    from tests.simulation.processes import Process
    from tests.simulation.world import Task


class Environ(MutableMapping[str, str]):
    """`os.environ`, also where a function has it as a default: that of whichever process runs."""

    def __init__(self, modules: Library) -> None:
        self._modules = modules

    @property
    def _values(self) -> dict[str, str]:
        return self._modules.process.environ

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)  # without the detour by an exception

    def __setitem__(self, name: str, value: str) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)


class Os:
    """`os`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.environ = Environ(process.world.modules)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_os, name)

    def uname(self) -> Any:
        return SimpleNamespace(nodename=self._process.host.name, machine="x86_64")

    def sched_getaffinity(self, pid: int) -> set[int]:
        return set(range(8))

    def urandom(self, count: int) -> bytes:
        return self._process.world.random.randbytes(count)

    def chdir(self, folder: str) -> None:
        """All folders are there."""

    def register_at_fork(self, **_: Any) -> None:
        """Nobody forks."""

    # -- descriptors ------------------------------------------------------------------------

    def _file(self, descriptor: int) -> Any:
        """Return what a descriptor leads to; None if it belongs to the real process."""
        self._process.world.running()
        return self._process.descriptors.get(descriptor)

    def pipe(self) -> tuple[int, int]:
        reader, writer = make_pipe(self._process.world)
        return self._process.new_descriptor(reader), self._process.new_descriptor(writer)

    def read(self, descriptor: int, count: int) -> bytes:
        file = self._file(descriptor)
        return real_os.read(descriptor, count) if file is None else file.read(count)

    def write(self, descriptor: int, data: bytes) -> int:
        file = self._file(descriptor)
        return real_os.write(descriptor, data) if file is None else file.write(data)

    def close(self, descriptor: int) -> None:
        if self._file(descriptor) is None:
            real_os.close(descriptor)
        else:
            self._process.close_descriptor(descriptor)

    def set_blocking(self, descriptor: int, blocking: bool) -> None:
        file = self._file(descriptor)
        if file is None:
            real_os.set_blocking(descriptor, blocking)
        else:
            file.is_blocking = blocking

    def fsync(self, descriptor: int) -> None:
        world = self._process.world
        world.park("the disk", world.random.uniform(0.001, 0.2))
        self._process.tools.disk.sync(descriptor)

    def listdir(self, folder: str = ".") -> list[str]:
        if folder != "/proc":
            return real_os.listdir(folder)
        self._process.world.running()
        return [str(process.pid) for process in self._process.host.processes]

    # -- processes --------------------------------------------------------------------------

    def getpid(self) -> int:
        return self._process.pid

    def getppid(self) -> int:
        return 1 if self._process.parent is None else self._process.parent.pid

    def pidfd_open(self, pid: int) -> int:
        for process in self._process.host.processes:
            if process.pid == pid:
                return self._process.new_descriptor(Pidfd(process))
        raise ProcessLookupError(errno.ESRCH, "No such process")

    def posix_spawn(
        self,
        program: str,
        argv: list[str],
        env: Mapping[str, str],
        *,
        file_actions: list[tuple[Any, ...]],
        **_: Any,
    ) -> int:
        self._process.world.running()
        files = {
            action[2]: self._process.descriptors[action[1]]
            for action in file_actions
            if action[0] == real_os.POSIX_SPAWN_DUP2
        }
        child = self._process.host.launch([program, *argv[1:]], env, self._process, files)
        return child.pid

    def waitpid(self, pid: int, options: int) -> tuple[int, int]:
        process = self._process
        process.world.running()
        if process.zombies:
            pid, code = process.zombies.popleft()
            return pid, code << 8 if code >= 0 else -code
        if any(each.parent is process for each in process.host.processes):
            return 0, 0
        raise ChildProcessError(errno.ECHILD, "No child processes")

    def kill(self, pid: int, number: int) -> None:
        self._signal([each for each in self._process.host.processes if each.pid == pid], number)

    def killpg(self, group: int, number: int) -> None:
        members = [each for each in self._process.host.processes if each.session == group]
        self._signal(members, number)

    def _signal(self, targets: list[Process], number: int) -> None:
        self._process.world.running()
        if not targets:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        for target in targets:
            target.signal(number)

    def _exit(self, code: int) -> None:
        self._process.tools.check_status(code)
        self._process.end(code)
        raise GreenletExit


class Popen:
    """`subprocess.Popen`, of a Python program or of ssh, with pipes for its three streams."""

    def __init__(self, process: Process, command: list[str], env: Any = None, **_: Any) -> None:
        world = process.world
        (child_in, stdin), (stdout, child_out), (stderr, child_err) = (
            make_pipe(world) for _ in range(3)
        )
        files: dict[int, File] = {0: child_in, 1: child_out, 2: child_err}
        self.stdin, self.stdout, self.stderr = (
            Stream(process, end) for end in (stdin, stdout, stderr)
        )
        self._world = world
        if real_os.path.basename(command[0]) == "ssh":
            self._child: Any = SshClient(process, command, files)
        else:
            environ = process.environ if env is None else env
            self._child = process.host.launch(list(command), environ, process, files)
        self.pid: int = self._child.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._child.code if self._child.is_gone else None
        return code

    def wait(self, timeout: float | None = None) -> int:
        if not self._child.is_gone:
            task = self._world.running()
            self._child.when_gone.append(lambda: self._world.wake(task))
            if not self._world.park("the end of a child process", timeout):
                raise real_subprocess.TimeoutExpired("a child process", timeout or 0.0)
        code: int = self._child.code
        return code

    def terminate(self) -> None:
        self._child.signal(15)

    def kill(self) -> None:
        self._child.signal(9)


def make_sys() -> ModuleType:
    """Return `sys` for a program that gets its modules through a pipe: it has them for itself."""
    found = ModuleType("sys")
    vars(found).update(vars(real_sys), modules={})
    return found


class _SimpleQueue:
    """`_queue.SimpleQueue`."""

    def __init__(self, process: Process) -> None:
        self._world = process.world
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._world.wake(self._waiting.popleft())

    def get(self) -> Any:
        while not self._items:
            self._waiting.append(self._world.running())
            self._world.park("an item of a queue")
        return self._items.popleft()


class _Module:
    """A module with some functions in place of the real ones."""

    def __init__(self, real: Any, **functions: Callable[..., Any]) -> None:
        self._real = real
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def make_modules(process: Process) -> dict[str, Any]:
    """Return the modules of this file for a process, by name."""

    def start_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
        thread = process.threading.Thread(None, function, args=arguments)
        thread.start()
        return thread.ident or 0

    def call_function(function: str, arguments: tuple[Any, ...]) -> int:
        process.is_subreaper = True  # prctl with PR_SET_CHILD_SUBREAPER
        return 0

    def ioctl(descriptor: int, request: int, name: bytes) -> bytes:
        addresses = {b"eth0": process.host.address, b"lo": LOOPBACK}
        address = addresses.get(name.rstrip(b"\0"))
        if address is None:
            raise OSError(errno.ENODEV, "No such device")
        return bytes(20) + bytes(map(int, address.split(".")))

    many = (1 << 16, 1 << 16)
    return {
        "_ctypes": _Module(
            _ctypes,
            call_function=call_function,
            dlopen=lambda *_: 0,
            dlsym=lambda _, name: name,
        ),
        "_queue": SimpleNamespace(SimpleQueue=lambda: _SimpleQueue(process)),
        "_thread": _Module(_thread, start_new_thread=start_thread),
        "fcntl": _Module(fcntl, ioctl=ioctl),
        "os": Os(process),
        "resource": _Module(resource, getrlimit=lambda _: many, setrlimit=lambda *_: None),
        "subprocess": _Module(
            real_subprocess,
            Popen=lambda command, **options: Popen(process, command, **options),
        ),
        "sys": make_sys(),
    }


def open_file(modules: Library, file: Any, *arguments: Any, **options: Any) -> Any:
    """Do what `open` does, where files in /proc describe simulated processes."""
    parts = file.split("/") if isinstance(file, str) else []
    if parts[:2] != ["", "proc"]:
        return open(file, *arguments, **options)
    for process in modules.process.host.processes:
        if parts[2:] == [str(process.pid), "stat"]:
            parent = 1 if process.parent is None else process.parent.pid
            return io.BytesIO(f"{process.pid} (x) S {parent} 0 {process.session} 0".encode())
        if parts[2:] == [str(process.pid), "cmdline"]:
            return io.BytesIO("\0".join(process.command).encode())
        if parts[2:] == [str(process.pid), "environ"]:
            words = [f"{name}={value}" for name, value in process.environ.items()]
            return io.BytesIO("\0".join(words).encode())
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", file)
