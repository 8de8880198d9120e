"""The body of a Spark task: an agent of the launcher at the end of a connection to the driver.

Spark calls `serve` in every task. It connects to the driver, says where it runs, starts the agent
that the driver sends, and passes bytes between the two until the driver ends the task. The agent
(see `horovod.runner.agents.agent`) starts the worker and ends everything that is left of it when
this process goes away: by a cancelled job, a killed executor, or a driver that is gone.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark import TaskContext

import horovod
from horovod.common.wire import Message, Session, encode_key
from horovod.runner.agents.host_agent import agent_arguments
from horovod.runner.common.util.host_hash import host_hash
from horovod.runner.functions.function_call import search_path
from horovod.runner.slots.worker_env import KEY
from horovod.spark.channel import DriverChannel
from horovod.spark.task import GPUS, get_available_devices
from horovod.spark.ticket import Ticket

_CHUNK = 1 << 16
_MOST_UNSENT = 4 << 20  # bytes, beyond which the agent's output waits in its pipe
_SPARKS_OWN = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT")
_RESTART = (
    "the worker in this task failed or is not needed; the task ends with an error so that Spark "
    "starts it again"
)
_VERSIONS = """\
import importlib.metadata as m, json
found = {}
for name in ("horovod", "torch"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def serve(ticket: Ticket, _rows: Iterable[Any]) -> Iterator[Any]:
    """Be a host of the job until the driver says otherwise; yields nothing."""
    context = TaskContext.get()
    assert context is not None
    last_chance = context.attemptNumber() + 1 >= ticket.max_failures
    for attempt in itertools.count():
        if not _serve_once(ticket, context, attempt):
            break
        if not last_chance:
            raise RuntimeError(_RESTART)  # Spark may find a better place for the next attempt
    yield from ()


def _serve_once(ticket: Ticket, context: TaskContext, attempt: int) -> bool:
    """Until the driver ends it; whether it is to begin again, as another host."""
    try:
        channel = _connect(ticket)
    except OSError as error:
        raise ConnectionError(
            f"the Spark task on {os.uname().nodename} cannot reach the driver at "
            f"{ticket.address}:{ticket.port} ({error}). Executors must be able to connect to ports "
            f"of the driver: see spark.driver.host, and the nics argument of horovod.spark.run"
        ) from None
    try:
        channel.send(describe(ticket, context, attempt))
        return _Relay(ticket, channel).run() == "again"
    finally:
        channel.close()


def describe(ticket: Ticket, context: TaskContext, attempt: int) -> dict[str, Any]:
    """What the driver needs to know about this task."""
    return {
        "partition": context.partitionId(),
        "attempt": [context.taskAttemptId(), attempt],
        "host": _host(),
        "hostname": os.uname().nodename,
        "pid": os.getpid(),
        "python": ticket.executable or sys.executable,
        "versions": _versions(ticket.executable),
    }


def _host() -> str:
    """What the executor's environment says, or a name that differs between YARN's containers."""
    return os.environ.get("HOROVOD_HOSTNAME") or host_hash(os.environ.get("CONTAINER_ID"))


def _versions(executable: str | None) -> dict[str, str | None]:
    """What is installed for the workers' Python, without importing it."""
    if executable is None:
        from importlib import metadata, util

        try:
            torch = metadata.version("torch") if util.find_spec("torch") else None
        except metadata.PackageNotFoundError:
            torch = None
        return {"horovod": horovod.__version__, "torch": torch}
    try:
        command = [executable, "-c", _VERSIONS]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}
        found = subprocess.run(command, capture_output=True, check=True, env=env, timeout=60)
        return {**json.loads(found.stdout), "horovod": horovod.__version__}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"problem": f"the workers' Python {executable!r} does not run: {error}"}


def _connect(ticket: Ticket) -> DriverChannel:
    """Connect within the time limit; the driver may be busy accepting hundreds."""
    import socket

    deadline = time.monotonic() + ticket.start_timeout
    sock = socket.create_connection((ticket.address, ticket.port), ticket.start_timeout)
    channel = DriverChannel(sock, Session(ticket.key, server=False))
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while not channel.session.established:
                channel.flush()
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError(f"no answer within {ticket.start_timeout:g} s")
                if channel.receive() is None:
                    raise ConnectionResetError("the driver closed the connection")
        channel.flush()
    except BaseException:
        channel.close()
        raise
    return channel


def worker_environment(ticket: Ticket) -> dict[str, str]:
    """The executor's environment and what was asked for, for the workers of this task."""
    env = {name: value for name, value in os.environ.items() if name not in _SPARKS_OWN}
    places = dict.fromkeys([*search_path(), *ticket.search_path])
    env["PYTHONPATH"] = os.pathsep.join(places)
    env[GPUS] = ",".join(get_available_devices())
    env.setdefault("HOROVOD_START_TIMEOUT", f"{ticket.start_timeout:g}")
    if "PYTHONPATH" in ticket.env:
        env["PYTHONPATH"] = os.pathsep.join([ticket.env["PYTHONPATH"], env["PYTHONPATH"]])
    rest = {name: value for name, value in ticket.env.items() if name != "PYTHONPATH"}
    return {**env, **rest, KEY: encode_key(ticket.key)}


class _Relay:
    """Passes bytes between the driver and the agent."""

    def __init__(self, ticket: Ticket, channel: DriverChannel) -> None:
        self._ticket = ticket
        self._channel = channel
        self._agent: subprocess.Popen[bytes] | None = None
        self._input = bytearray()
        self._sources: dict[int, str] = {}  # the agent's streams that are open
        self._silent = False  # nothing more will be said
        self._ended: str | None = None

    def run(self) -> str:
        """How it ended: "done" or "again"."""
        try:
            while self._ended is None:
                self._wait_and_pass()
        finally:
            self._end_agent()
        if self._ended == "gone":
            raise ConnectionError("the driver is gone, and with it the job of this task")
        return self._ended

    def _wait_and_pass(self) -> None:
        channel = self._channel
        with selectors.DefaultSelector() as selector:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0)
            selector.register(channel.socket, events)
            if channel.unsent < _MOST_UNSENT:
                for fd in self._sources:
                    selector.register(fd, selectors.EVENT_READ)
            if self._input and self._agent is not None and self._agent.stdin is not None:
                selector.register(self._agent.stdin, selectors.EVENT_WRITE)
            ready = {key.fd for key, _ in selector.select()}
        channel.flush()
        if channel.socket.fileno() in ready:
            self._take()
        for fd in list(self._sources):
            if fd in ready:
                self._pass_on(fd)
        self._write_input()
        if self._silent and not channel.unsent:
            self._silent = False
            channel.finish()

    def _take(self) -> None:
        try:
            messages = self._channel.receive()
        except BlockingIOError:
            return
        except OSError:  # a WireError is one
            messages = None
        if messages is None:
            self._ended = "gone"
            return
        for message in messages:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        if "agent" in message.header:
            self._start_agent(int(message.header["agent"]))
        elif "end" in message.header:
            self._ended = str(message.header["end"])
        else:
            self._input += message.body

    def _start_agent(self, length: int) -> None:
        self._agent = subprocess.Popen(
            [sys.executable, *agent_arguments(length)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Spark ends the session of its workers; the agent tidies up
            env=worker_environment(self._ticket),
        )
        for pipe in (self._agent.stdin, self._agent.stdout, self._agent.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        assert self._agent.stdout is not None
        assert self._agent.stderr is not None
        self._sources = {
            self._agent.stdout.fileno(): "output",
            self._agent.stderr.fileno(): "errors",
        }

    def _pass_on(self, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._channel.send({self._sources[fd]: True}, data)
            return
        del self._sources[fd]
        if not self._sources:
            assert self._agent is not None
            self._channel.send({"exit": self._agent.wait()})
            self._silent = True

    def _write_input(self) -> None:
        if self._agent is None or self._agent.stdin is None:
            return
        try:
            while self._input:
                del self._input[: os.write(self._agent.stdin.fileno(), self._input[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._input.clear()  # it has ended, which its other pipes tell

    def _end_agent(self) -> None:
        """The agent ends everything when its stdin is closed, and is gone when this returns."""
        if self._agent is None:
            return
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        for pipe in (self._agent.stdout, self._agent.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), True)
            while pipe.read(_CHUNK):
                pass  # it must not wait for a reader
            pipe.close()
        self._agent.wait()
