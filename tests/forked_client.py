"""What a launcher starts in place of Python for a program that is forked: see `forked_python`.

It hands the program's arguments, environment, folder and streams to the test process, passes
signals on, and ends as the program does. It imports little, so that it starts in milliseconds.
What needs no torch, or needs options of Python, gets a Python of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

AGENT_NAME = "HOROVOD_TEST_AGENT_NAME"
"""Environment variable with the name that agents get for their Python instead of its own.

That of `forked_python` makes an agent fork workers too that it starts with its Python. Agents need
no site-packages, which Python does not find under another name.
"""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(path: str, arguments: list[str]) -> None:
    """Ask the test process that listens at `path` for a process that runs `arguments`."""
    request = {
        "arguments": arguments,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "client": os.getpid(),
    }
    content = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(content).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(content)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        exit_code = int(server.recv(16))
    if exit_code < 0:  # a signal has ended the program, and ends this process likewise
        if -exit_code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


def is_forked(arguments: list[str]) -> bool:
    """Return whether a program is to be forked that Python would run with these arguments."""
    first = arguments[0] if arguments else "-"
    if first == "-m":
        return arguments[1] != "horovod.runner"
    return first == "-c" or not first.startswith("-")


if __name__ == "__main__":
    socket_path, *program = sys.argv[1:]
    if program[:1] == ["-u"]:  # streams of forked programs are never buffered
        del program[0]
    if not is_forked(program):
        is_agent = program[-1:] == ["horovodrun-agent"]
        name = os.environ.get(AGENT_NAME, sys.executable) if is_agent else sys.executable
        os.execv(sys.executable, [name, *program])
    main(socket_path, program)
