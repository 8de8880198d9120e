"""Simulated hosts and processes, and the system modules that each process finds.

A process runs a module of this project with everything that it imports (`modules`). Python's
modules for time, threads, connections, signals, random numbers and other processes are replaced by
simulated ones, some of which are here.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import secrets as real_secrets
import signal as real_signal
import socket as real_socket
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit

from tests.simulation.connections import SelectModule, SelectorsModule, SocketModule
from tests.simulation.modules import ROOT, Library
from tests.simulation.network import Network, Socket
from tests.simulation.pipes import File
from tests.simulation.system import make_modules
from tests.simulation.threads import Threading, Time
from tests.simulation.world import World

_FIRST_DESCRIPTOR = 1 << 20
"""Descriptors of simulated files are no numbers of real ones, which a process may have too."""


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

    def launch(
        self,
        command: list[str],
        environ: Mapping[str, str],
        parent: Process | None,
        files: Mapping[int, File],
    ) -> Process:
        """Start a command, in a session of its own, with these files as its descriptors."""
        assert self.network.start_program is not None, "a cluster says what programs there are"
        process: Process = self.network.start_program(self, command, environ, parent, files)
        return process

    def lose_power(self) -> None:
        """End everything on it without a word."""
        if self.is_down:
            return
        self.is_down, self.down_since = True, self.network.world.now
        for process in list(self.processes):
            process.lose_power()
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
        program: Callable[[Library], Any],
        environ: Mapping[str, str],
        tools: Any,
        parent: Process | None = None,
        files: Mapping[int, File] | None = None,
    ) -> None:
        """Start a process.

        Args:
            host: The host.
            name: What the story calls it.
            program: A function that gets the modules.
            environ: The environment.
            tools: What modules of the program find as `simulated`.
            parent: The process that starts it.
            files: Its descriptors.
        """
        self.host = host
        self.name = name
        self.world: World = host.network.world
        self.pid = self.session = host.network.new_pid()
        self.parent = parent
        self.environ = dict(environ)
        self.command: list[str] = []
        self.started = self.world.now
        self.is_gone, self.ended = False, 0.0
        self.is_stopped = False
        self.is_subreaper = False
        self.code: int | None = None
        self.descriptors: dict[int, Any] = {}
        self.handlers: dict[int, Any] = {}
        self.wakeup_fd = -1
        self.zombies: deque[tuple[int, int]] = deque()  # pids and codes of children that ended
        self.when_gone: list[Callable[[], None]] = []
        self.at_exit: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.tools = tools
        self.variables: list[Any] = []  # of modules, while another process runs
        self._alarm = 0  # counts calls of `set_alarm`
        self._pending: list[int] = []  # signals that came while it was stopped
        self._fds = itertools.count(_FIRST_DESCRIPTOR)
        self.threading = Threading(self)
        self.system = {
            **make_modules(self),
            "_signal": _Signal(self),
            "_socket": SocketModule(self),
            "atexit": _AtExit(self),
            "importlib": _ImportLib(self),
            "psutil": _Psutil(self),
            "secrets": _Secrets(self),
            "select": SelectModule(self),
            "selectors": SelectorsModule(self),
            "signal": _Signal(self),
            "simulated": tools,
            "socket": SocketModule(self),
            "threading": self.threading,
            "time": Time(self),
        }
        for number, file in (files or {}).items():
            self.descriptors[number] = file
            file.references += 1
        host.processes.append(self)
        self._main = self.world.spawn(self, lambda: self._run(program), "main")
        self.threading.begin(self._main)

    def __str__(self) -> str:
        return f"{self.name} on {self.host.name}"

    def new_descriptor(self, file: Socket | File) -> int:
        fd = next(self._fds)
        self.descriptors[fd] = file
        if isinstance(file, File):
            file.references += 1
        return fd

    def close_descriptor(self, fd: int) -> None:
        self.descriptors.pop(fd).close()

    def report(self, what: str, error: BaseException) -> None:
        """Add an error that nobody caught to the story, and let the job's promises be checked."""
        text = _describe_error(error)
        self.world.note(f"{self}: {what}: {text}")
        if 2 in self.descriptors:
            self.descriptors[2].put(f"{text}\n".encode())
        self.tools.check_error(error)

    def _run(self, program: Callable[[Library], Any]) -> None:
        try:
            code = self._outcome(lambda: program(self.world.modules))
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
        """End: connections are closed, and the parent learns of it."""
        if self.is_gone:
            return
        self.code = code
        for file in list(self.descriptors.values()):
            file.close()
        self._vanish()
        heir = self.parent
        while heir is not None and (heir.is_gone or not heir.is_subreaper):
            heir = heir.parent
        for child in self.host.processes:
            child.parent = heir if child.parent is self else child.parent
        if heir is not None:
            heir.zombies.extend(self.zombies)
        if self.parent is not None and not self.parent.is_gone:
            self.parent.zombies.append((self.pid, code))
            self.parent.signal(real_signal.SIGCHLD)
        for call in self.when_gone:
            call()

    def lose_power(self) -> None:
        """End without a word."""
        self.code = -real_signal.SIGKILL
        for file in self.descriptors.values():
            file.vanish()
            if file.peer is not None:
                file.peer.ask_peer()
        self._vanish()

    def ask_peers(self) -> None:
        """Let the kernel ask whether the other ends of all connections are still there."""
        for sock in self.descriptors.values():
            sock.ask_peer()

    def _vanish(self) -> None:
        self.is_gone, self.ended = True, self.world.now
        self.world.has_changed = True
        self.host.processes.remove(self)
        self.world.forget(self)
        self.world.stopped.discard(self)

    def hang(self) -> None:
        """Stop the main thread for good: the other threads go on."""
        self._main.is_frozen = True
        self.world.stopped.add(self)

    def set_alarm(self, seconds: int) -> None:
        """Send SIGALRM after this time, if nobody calls this again before; 0 stands for never."""
        self._alarm += 1
        number = self._alarm
        if seconds:
            self.world.later(
                seconds, lambda: self.signal(real_signal.SIGALRM) if self._alarm == number else None
            )

    def signal(self, number: int) -> None:
        """Deliver a signal."""
        if self.is_gone:
            return
        handler = self.handlers.get(number, real_signal.SIG_DFL)
        if number == 0:
            return  # somebody asks whether it runs
        if number == real_signal.SIGSTOP:
            self.is_stopped = True
            self.world.stopped.add(self)
        elif number == real_signal.SIGCONT:
            self.is_stopped = False
            if not self._main.is_frozen:
                self.world.stopped.discard(self)
            pending, self._pending = self._pending, []
            for each in pending:
                self.signal(each)
        elif number == real_signal.SIGKILL:
            self.end(-number)
        elif self.is_stopped:
            self._pending.append(number)
        elif callable(handler):
            self.world.act(self._main, lambda: handler(number, None))
            waker = self.descriptors.get(self.wakeup_fd)
            if waker is not None:
                waker._transmit(bytes([number]))
        elif handler == real_signal.SIG_DFL and number != real_signal.SIGCHLD:
            self.end(-number)


def _describe_error(error: BaseException | None) -> str:
    """Return an error and those that it was raised from, in the same words with every Python."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error}")
        for frame in traceback.extract_tb(error.__traceback__):
            file = Path(frame.filename)
            if file.is_relative_to(ROOT) and not frame.name.startswith("<"):
                lines.append(f"  {file.relative_to(ROOT)}:{frame.lineno} in {frame.name}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(lines)


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

    def alarm(self, seconds: int) -> None:
        self._process.set_alarm(seconds)

    def set_wakeup_fd(self, fd: int, *, warn_on_full_buffer: bool = True) -> int:
        before, self._process.wakeup_fd = self._process.wakeup_fd, fd
        return before
