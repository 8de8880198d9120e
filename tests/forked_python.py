"""Programs that start in milliseconds, because they are forked from the tests' fork server.

A command that begins with `forked_python()` in place of `sys.executable` can be given to any
launcher on this machine. The launcher starts a small client, `forked_client`, which asks the test
process for a process that has torch (and what else `PRELOAD` names) imported already. Python needs
some seconds of a core for that in every rank that is started afresh.

The program runs on the client's host, where `tests.hosts` has made several.

It is meant for tests of what programs compute. Tests of how processes start, import and end use
`sys.executable`: the launcher's child is the client here and not the program, modules are imported
in another order, and the interpreter is not taken down in the end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import io
import json
import multiprocessing.connection
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

from tests.rank_process import ForkedProcess, PassedFile, leave_test_process, start_fork_server

_NAME_SPACES = ("net", "uts", "mnt")
_CLIENT = Path(__file__).with_name("forked_client.py")


def forked_python() -> list[str]:
    """Return the beginning of a command that runs a program as `sys.executable` would.

    The arguments of a program follow: its path, ``-c`` and its text, or ``-m`` and its module. What
    the program itself starts with its `sys.executable` is forked, too.
    """
    return [_listen()]


# -- in the test process -------------------------------------------------------------------------


@functools.cache
def _listen() -> str:
    """Serve clients until the test process ends; return the path of the command that starts one."""
    folder = tempfile.mkdtemp(prefix="forked-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    start_fork_server()  # here, not in the thread: it changes the environment for a moment

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    command = Path(folder, "python")
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {_CLIENT} {folder}/socket "$@"\n')
    command.chmod(0o755)
    return str(command)


def _serve(client: socket.socket) -> None:
    """Run one client's program; kill it if the client ends first."""
    with client:
        size, streams, _, _ = socket.recv_fds(client, 8, 3)
        try:
            request = _receive(client, int.from_bytes(size, "big"))
            if not request:
                return  # the launcher has ended the client before it asked for anything
            passed = [PassedFile(stream) for stream in streams]
            arguments = (_listen(), passed, json.loads(request))
            process = ForkedProcess(target=_main, args=arguments)
            process.start()
        finally:  # else whoever reads what the program writes would never see the end
            for stream in streams:
                os.close(stream)
        while process.sentinel not in multiprocessing.connection.wait([client, process.sentinel]):
            number = client.recv(1)
            _signal(process, number[0] if number else signal.SIGKILL)
            if not number:  # the client was killed, and its program is
                process.join()
        process.join()
        with contextlib.suppress(OSError):
            client.sendall(str(process.exitcode).encode())


def _receive(client: socket.socket, size: int) -> bytes:
    """Return what the client sends; nothing if the client ends first."""
    request = b""
    while len(request) < size:
        received = client.recv(1 << 16)
        if not received:
            return b""
        request += received
    return request


def _signal(process: Any, number: int) -> None:
    """Signal the program; SIGKILL is for every process that it has started, too."""
    with contextlib.suppress(ProcessLookupError):
        if number != signal.SIGKILL:
            os.kill(process.pid, number)
            return
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # it has not made its group yet
            process.kill()


# -- in the program's process --------------------------------------------------------------------


def _main(executable: str, streams: list[int], request: dict[str, Any]) -> None:
    leave_test_process(dict(enumerate(streams)), request["environ"])
    _enter_host(request["client"])
    for stream in streams:
        os.close(stream)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    os.chdir(request["folder"])
    sys.executable = executable
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    importlib.import_module("torch").set_num_threads(1)
    exit_code: Any = 0
    try:
        _run(request["arguments"])
    except SystemExit as end:
        exit_code = end.code
        if exit_code is not None and not isinstance(exit_code, int):
            print(exit_code, file=sys.stderr)
            exit_code = 1
    except BaseException as error:
        sys.last_value = error  # what Python sets, and what is looked at when the process ends
        sys.excepthook(type(error), error, error.__traceback__)
        exit_code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit((exit_code or 0) & 0xFF)


def _enter_host(client: int) -> None:
    """Enter the name spaces of the client, which may run on a host that `tests.hosts` has made."""
    for name in _NAME_SPACES if sys.platform == "linux" else ():
        theirs = f"/proc/{client}/ns/{name}"
        if not os.path.samefile(theirs, f"/proc/self/ns/{name}"):
            space = os.open(theirs, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(space, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns: {theirs}")
            os.close(space)


def _run(arguments: list[str]) -> None:
    """Run a program as Python does that is given these arguments."""
    first, *others = arguments
    if first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        return
    is_text = first == "-c"
    source = others.pop(0) if is_text else Path(first).read_text()
    sys.argv = [first, *others]
    sys.path.insert(0, "" if is_text else os.path.dirname(os.path.abspath(first)))
    module = types.ModuleType("__main__")
    if not is_text:
        module.__file__ = first
    sys.modules["__main__"] = module  # classes of the program are pickled by this name
    exec(compile(source, "<string>" if is_text else first, "exec"), module.__dict__)
