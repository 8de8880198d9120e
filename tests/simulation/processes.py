"""Simulated hosts and processes, and the system modules that each process finds.

A process runs a module of this project with everything that it imports (`modules`). Python's
modules for time, threads, connections, signals, random numbers and other processes are replaced by
simulated ones, some of which are here.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import os as real_os
import secrets as real_secrets
import signal as real_signal
import socket as real_socket
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit

from tests.simulation.connections import SelectModule, SelectorsModule, SocketModule
from tests.simulation.modules import Library
from tests.simulation.network import Network, Socket
from tests.simulation.threads import Threading, Time
from tests.simulation.world import World


class Host:
    """A machine."""

    def __init__(self, name: str, network: Network) -> None:
        random = network.world.random
        self.name = name
        self.network = network
        self.address = network.add_host(self)
        self.is_down = False
        self.down_since = 0.0
        self.boot_offset = random.uniform(0, 1e5)
        self.clock_offset = random.uniform(-5, 5)
        self.processes: list[Process] = []
        self.when_lost: list[Callable[[], None]] = []  # called when its power is gone

    def lose_power(self) -> None:
        """End everything on it without a word."""
        if self.is_down:
            return
        self.is_down, self.down_since = True, self.network.world.now
        for process in list(self.processes):
            process.crash(closes_connections=False)
        callbacks, self.when_lost = self.when_lost, []
        for call in callbacks:
            call()

    def boot(self) -> None:
        self.is_down = False
        self.network.send_again()


class Process:
    """A running program."""

    def __init__(
        self,
        host: Host,
        name: str,
        program: str,
        environ: Mapping[str, str],
        when_ended: Callable[[int], None] = lambda code: None,
        tools: Any = None,
    ) -> None:
        """`program` is a module with a function `main`, which finds `tools` as `simulated`."""
        self.host = host
        self.name = name
        self.world: World = host.network.world
        self.pid = host.network.new_pid()
        self.environ = dict(environ)
        self.is_gone = False
        self.is_stopped = False
        self.code: int | None = None
        self.descriptors: dict[int, Socket] = {}
        self.handlers: dict[int, Any] = {}
        self.wakeup_fd = -1
        self.at_exit: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.tools = tools
        self.variables: list[Any] = []  # of modules, while another process runs
        self._when_ended = when_ended
        self._fds = itertools.count(10)
        self._threading = Threading(self)
        self.system = {
            "atexit": _AtExit(self),
            "importlib": _ImportLib(self),
            "os": _Os(self),
            "psutil": _Psutil(self),
            "secrets": _Secrets(self),
            "select": SelectModule(self),
            "selectors": SelectorsModule(self),
            "signal": _Signal(self),
            "simulated": tools,
            "socket": SocketModule(self),
            "threading": self._threading,
            "time": Time(self),
        }
        host.processes.append(self)
        self._main = self.world.spawn(self, lambda: self._run(program), "main")
        self._threading.begin(self._main)

    def __str__(self) -> str:
        return f"{self.name} on {self.host.name}"

    def new_descriptor(self, sock: Socket) -> int:
        fd = next(self._fds)
        self.descriptors[fd] = sock
        return fd

    def report(self, what: str, error: BaseException) -> None:
        """Add an error that nobody caught to the story, and let the job's promises be checked."""
        text = "".join(traceback.format_exception(error)).rstrip()
        self.world.note(f"{self}: {what}: {text}")
        self.tools.check_error(error)

    def _run(self, program: str) -> None:
        try:
            code = self._outcome(lambda: self.world.modules.load(program).main())
            while self.at_exit:
                function, arguments = self.at_exit.pop()
                self._outcome(lambda: function(*arguments))  # noqa: B023 (called at once)
        finally:
            self._main.is_done = True
        self.end(code)

    def _outcome(self, function: Callable[[], Any]) -> int:
        """Return the status with which a function ends the process."""
        try:
            function()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            self.tools.check_status(code)
            return code
        except GreenletExit:
            raise
        except BaseException as error:
            self.report("failed", error)
            return 1
        return 0

    # -- the end ----------------------------------------------------------------------------

    def end(self, code: int) -> None:
        """End in order: connections are closed, and the parent learns of it."""
        if self.is_gone:
            return
        self.code = code
        self._close_all()
        self._vanish()
        self._when_ended(code)

    def crash(self, *, closes_connections: bool = True) -> None:
        """End at once, wherever the threads are."""
        if self.is_gone:
            return
        self.code = -real_signal.SIGKILL
        if closes_connections:
            self._close_all()
        else:
            for sock in self.descriptors.values():
                sock.vanish()
                if sock.peer is not None:
                    sock.peer.ask_peer()
        self._vanish()
        if closes_connections:
            self._when_ended(self.code)

    def ask_peers(self) -> None:
        """Let the kernel ask whether the other ends of all connections are still there."""
        for sock in self.descriptors.values():
            sock.ask_peer()

    def _close_all(self) -> None:
        for sock in list(self.descriptors.values()):
            sock.close()

    def _vanish(self) -> None:
        self.is_gone = True
        self.host.processes.remove(self)
        self.world.forget(self)

    def hang(self) -> None:
        """Stop the main thread for good: the other threads go on."""
        self._main.is_frozen = self.world.has_stopped = True

    def signal(self, number: int) -> None:
        """Deliver a signal."""
        if self.is_gone:
            return
        handler = self.handlers.get(number, real_signal.SIG_DFL)
        if number == 0:
            return  # somebody asks whether it runs
        if number == real_signal.SIGSTOP:
            self.is_stopped = self.world.has_stopped = True
        elif number == real_signal.SIGCONT:
            self.is_stopped = False
        elif number == real_signal.SIGKILL or handler is real_signal.SIG_DFL:
            self.crash()
            self.code = -number
        elif callable(handler):
            self.world.act(self._main, lambda: handler(number, None))
            waker = self.descriptors.get(self.wakeup_fd)
            if waker is not None:
                waker._transmit(bytes([number]))


class _Environ(MutableMapping[str, str]):
    """`os.environ`, also where a function has it as a default: that of whichever process runs."""

    def __init__(self, modules: Library) -> None:
        self._modules = modules

    @property
    def _values(self) -> dict[str, str]:
        return self._modules.process.environ

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)


class _Os:
    """`os`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def environ(self) -> _Environ:
        return _Environ(self._process.world.modules)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_os, name)

    def fsync(self, descriptor: int) -> None:
        world = self._process.world
        world.park("the disk", world.random.uniform(0.001, 0.2))
        self._process.tools.disk.sync(descriptor)

    def getpid(self) -> int:
        return self._process.pid

    def kill(self, pid: int, number: int) -> None:
        for process in list(self._process.host.processes):
            if process.pid == pid:
                process.signal(number)
                return
        raise ProcessLookupError(errno.ESRCH, "No such process")

    killpg = kill

    def _exit(self, code: int) -> None:
        self._process.tools.check_status(code)
        self._process.end(code)
        raise GreenletExit

    def register_at_fork(self, **_: Any) -> None:
        """Nobody forks."""


class _AtExit:
    """`atexit`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def register(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._process.at_exit.append((function, arguments))

    def unregister(self, function: Callable[..., Any]) -> None:
        kept = [each for each in self._process.at_exit if each[0] != function]
        self._process.at_exit[:] = kept


class _ImportLib:
    """`importlib`."""

    def __init__(self, process: Process) -> None:
        self._modules = process.world.modules

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)

    def import_module(self, name: str) -> Any:
        if name == "torch._dynamo":  # seconds, for a compiler that nobody uses here
            return None
        is_ours = name.startswith("horovod")
        return self._modules.load(name) if is_ours else importlib.import_module(name)


class _Psutil:
    """`psutil`, as far as it tells about networks and processes of the host."""

    STATUS_ZOMBIE = "zombie"
    Error = ProcessLookupError

    def __init__(self, process: Process) -> None:
        self._host = process.host

    def net_if_stats(self) -> dict[str, Any]:
        return {"eth0": SimpleNamespace(isup=True)}

    def net_if_addrs(self) -> dict[str, Any]:
        family = real_socket.AF_INET
        mask = "255.255.255.0"
        return {"eth0": [SimpleNamespace(family=family, address=self._host.address, netmask=mask)]}

    def Process(self, pid: int) -> Any:
        if all(process.pid != pid for process in self._host.processes):
            raise ProcessLookupError(errno.ESRCH, "No such process")
        return SimpleNamespace(status=lambda: "running")


class _Secrets:
    """`secrets`: from the seed."""

    def __init__(self, process: Process) -> None:
        self._random = process.world.random

    def __getattr__(self, name: str) -> Any:
        return getattr(real_secrets, name)

    def token_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)


class _Signal:
    """`signal`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(real_signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        before = self.getsignal(number)
        self._process.handlers[number] = handler
        return before

    def getsignal(self, number: int) -> Any:
        return self._process.handlers.get(number, real_signal.SIG_DFL)

    def set_wakeup_fd(self, fd: int) -> int:
        before, self._process.wakeup_fd = self._process.wakeup_fd, fd
        return before
