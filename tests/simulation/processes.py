"""Simulated hosts and processes: each process has modules of Horovod of its own.

A process runs a module of this project with everything that it imports. Modules of Horovod are
executed anew for every process, since they keep state; those that neither use the system nor
import one that does are shared. Python's modules for time, threads, connections, signals and
random numbers are replaced by simulated ones.
"""

from __future__ import annotations

import ast
import builtins
import errno
import functools
import importlib
import importlib.util
import itertools
import os as real_os
import secrets as real_secrets
import signal as real_signal
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from greenlet import GreenletExit

from tests.simulation.network import Network, SelectorsModule, Socket, SocketModule
from tests.simulation.world import World

_ROOT = Path(__file__).resolve().parents[2]
_REPLACED = {"os", "secrets", "selectors", "signal", "simulated", "socket", "threading", "time"}
_OURS = ("horovod", "tests")


class Host:
    """A machine."""

    def __init__(self, name: str, network: Network, cluster: dict[str, Host]) -> None:
        random = network.world.random
        self.name = name
        self.network = network
        self.cluster = cluster
        self.is_down = False
        self.boot_offset = random.uniform(0, 1e5)
        self.clock_offset = random.uniform(-5, 5)
        self.processes: list[Process] = []
        self.when_lost: list[Callable[[], None]] = []  # called when its power is gone
        cluster[name] = self

    def lose_power(self) -> None:
        """End everything on it without a word."""
        self.is_down = True
        for process in list(self.processes):
            process.crash(closes_connections=False)
        callbacks, self.when_lost = self.when_lost, []
        for call in callbacks:
            call()

    def boot(self) -> None:
        self.is_down = False


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
        patches: Mapping[str, tuple[tuple[str, str], ...]] | None = None,
    ) -> None:
        """`program` is a module with a function `main`; `tools` is what it imports as `simulated`.

        `patches` are texts to replace in the sources of modules, by the modules' names.
        """
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
        self.tools = tools
        self._when_ended = when_ended
        self._fds = itertools.count(10)
        self._modules = _Modules(self, patches or {})
        host.processes.append(self)
        self._main = self.world.spawn(self, lambda: self._run(program), "main")

    def __str__(self) -> str:
        return f"{self.name} on {self.host.name}"

    def new_descriptor(self, sock: Socket) -> int:
        fd = next(self._fds)
        self.descriptors[fd] = sock
        return fd

    def report(self, what: str, error: BaseException) -> None:
        """Add an error that nobody caught to the story."""
        text = "".join(traceback.format_exception(error)).rstrip()
        self.world.note(f"{self}: {what}: {text}")

    def _run(self, program: str) -> None:
        code = 0
        try:
            self._modules.load(program).main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except GreenletExit:
            raise
        except BaseException as error:
            self.report("failed", error)
            code = 1
        finally:
            self._main.is_done = True
        self.end(code)

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
        self._vanish()
        if closes_connections:
            self._when_ended(self.code)

    def _close_all(self) -> None:
        for sock in list(self.descriptors.values()):
            sock.close()

    def _vanish(self) -> None:
        self.is_gone = True
        self.host.processes.remove(self)
        self.world.forget(self)

    def signal(self, number: int) -> None:
        """Deliver a signal."""
        if self.is_gone:
            return
        handler = self.handlers.get(number, real_signal.SIG_DFL)
        if number == real_signal.SIGSTOP:
            self.is_stopped = True
        elif number == real_signal.SIGCONT:
            self.is_stopped = False
        elif number == real_signal.SIGKILL or handler is real_signal.SIG_DFL:
            self.crash()
            self.code = -number
        elif callable(handler):
            handler(number, None)
            waker = self.descriptors.get(self.wakeup_fd)
            if waker is not None:
                waker._transmit(bytes([number]))


class _Modules:
    """The modules of one process."""

    def __init__(
        self, process: Process, patches: Mapping[str, tuple[tuple[str, str], ...]]
    ) -> None:
        from tests.simulation.threads import Threading, Time

        self._patches = patches
        self._loaded: dict[str, Any] = {}
        self._replaced = {
            "os": _Os(process),
            "secrets": _Secrets(process),
            "selectors": SelectorsModule(process),
            "signal": _Signal(process),
            "simulated": process.tools,
            "socket": SocketModule(process),
            "threading": Threading(process),
            "time": Time(process),
        }
        self._builtins = {**vars(builtins), "__import__": self._import}

    def load(self, name: str) -> Any:
        """Return this process's module of that name."""
        if name in self._loaded:
            return self._loaded[name]
        parent, _, child = name.rpartition(".")
        above = self.load(parent) if parent else None
        if name == "horovod.common.logging":
            module: Any = _Logging(self._replaced["simulated"])
        elif not _uses_the_system(name) and not any(map(name.startswith, self._patches)):
            module = importlib.import_module(name)
        else:
            if name.startswith("horovod"):
                importlib.import_module(name)  # dataclasses look their module up by its name
            module = ModuleType(name)
            path, code = _compiled(name, self._patches.get(name, ()))
            module.__file__ = str(path)
            if path.name == "__init__.py":
                module.__path__ = [str(path.parent)]
            module.__package__ = name if path.name == "__init__.py" else parent
            vars(module)["__builtins__"] = self._builtins
            self._loaded[name] = module
            exec(code, vars(module))
        self._loaded[name] = module
        if above is not None and not hasattr(above, child):
            setattr(above, child, module)
        return module

    def _import(
        self, name: str, globals_: Any = None, locals_: Any = None, names: Any = (), level: int = 0
    ) -> Any:
        """Do what an import statement of the code under test asks for."""
        if level:
            name = importlib.util.resolve_name("." * level + name, globals_["__package__"])
        top = name.partition(".")[0]
        if name in self._replaced:
            return self._replaced[name]
        if top not in _OURS:
            return builtins.__import__(name, globals_, locals_, names, 0)
        module = self.load(name)
        if not names:
            return self.load(top)
        for each in names:
            if not hasattr(module, each) and _path_of(f"{name}.{each}") is not None:
                self.load(f"{name}.{each}")
        return module


@functools.cache
def _path_of(name: str) -> Path | None:
    base = _ROOT.joinpath(*name.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.exists():
            return path
    return None


@functools.cache
def _compiled(name: str, patches: tuple[tuple[str, str], ...]) -> tuple[Path, Any]:
    path = _path_of(name)
    if path is None:
        raise ModuleNotFoundError(f"No module named {name!r}")
    source = path.read_text(encoding="utf-8")
    for before, after in patches:
        if source.count(before) != 1:
            raise ValueError(f"{before!r} is {source.count(before)} times in {name}, not once")
        source = source.replace(before, after)
    return path, compile(source, str(path), "exec")


@functools.cache
def _imports(name: str) -> frozenset[str]:
    """Return what a module imports, wherever the statement is."""
    path = _path_of(name)
    if path is None:
        return frozenset()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


@functools.cache
def _uses_the_system(name: str) -> bool:
    """Return whether a module, or one that it imports, needs what is simulated."""
    return _reaches_the_system(name, set())


def _reaches_the_system(name: str, seen: set[str]) -> bool:
    seen.add(name)
    for imported in _imports(name):
        top = imported.partition(".")[0]
        if imported in _REPLACED or imported == "horovod.common.logging":
            return True
        is_ours = top in _OURS and imported not in seen and _path_of(imported) is not None
        if is_ours and _reaches_the_system(imported, seen):
            return True
    return False


class _Os:
    """`os`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.environ = process.environ

    def __getattr__(self, name: str) -> Any:
        return getattr(real_os, name)

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
        self._process.end(code)
        raise GreenletExit

    def register_at_fork(self, **_: Any) -> None:
        """Nobody forks."""


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


class _Logging(ModuleType):
    """`horovod.common.logging`: lines are part of the story."""

    def __init__(self, tools: Any) -> None:
        super().__init__("horovod.common.logging")
        self._tools = tools
        self.LEVELS = {"warning": 30}

    def get_logger(self, name: str = "") -> _Logger:
        return _Logger(self._tools)

    def log_once(self, logger: _Logger, level: int, key: object, text: str, *args: Any) -> None:
        logger.log(level, text, *args)


class _Logger:
    def __init__(self, tools: Any) -> None:
        self._tools = tools

    def log(self, level: int, text: str, *args: Any, **_: Any) -> None:
        self._tools.note(text % args if args else text)

    def __getattr__(self, level: str) -> Any:
        return lambda text, *args, **_: self.log(0, text, *args)

    def isEnabledFor(self, level: int) -> bool:
        return False
