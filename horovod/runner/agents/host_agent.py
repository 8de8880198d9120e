"""One host of a job, seen from the launcher: its agent, and the pipes to it.

`static_job` starts one `HostAgent` for each host (the elastic driver also later), `supervise` waits
for its descriptors and takes its events. Nothing here blocks and there are no threads: three
descriptors for each host is all. See `agent` for the other side.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.runner.agents.agent_link import NO_INPUT, AgentLink, ProcessLink
from horovod.runner.agents.bootstrap import Packed, pack_modules
from horovod.runner.agents.frames import EVENT, STREAMS, FrameReader
from horovod.runner.agents.starter import Starter

_KEPT_ERRORS = 8000
_AGENT_MODULES = (
    *("bootstrap", "frames", "processes", "cores", "host_facts", "agent_input", "agent_output"),
    "agent",
)


@dataclass(frozen=True)
class WorkerSpec:
    """What makes one worker different from the others of its host."""

    id: int  # unlike every other that was started in this job
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    bind: tuple[str, int, int] | None = None  # see `cores.share_of_cores`
    input: bool = False  # whether `feed` brings its stdin; else there is none


@dataclass(frozen=True)
class Output:
    """What a worker wrote; nothing when it has closed the stream."""

    worker: int
    stream: str  # "stdout" or "stderr"
    data: bytes


@dataclass(frozen=True)
class AgentEvent:
    """What an agent said: one of the kinds in `agent`, with its content."""

    kind: str
    content: Any


@dataclass(frozen=True)
class AgentEnded:
    """The agent, or the connection to it, has ended; ``finished`` if that was in order."""

    finished: bool


Event = Output | AgentEvent | AgentEnded


class HostAgent:
    """The agent of one host."""

    def __init__(
        self, name: str, starter: Starter | None = None, link: AgentLink | None = None
    ) -> None:
        """Start the agent: here, through a starter, or at the far end of a link that exists.

        Raises `OSError` if not even that is possible.
        """
        self.name = name
        self.hello: Mapping[str, Any] | None = None  # what it said about its host
        self.finished = False  # it said that nothing is left
        self.is_dismissed = False  # it was told to end by us
        self._reader = FrameReader()
        self._errors = b""
        self._commands: deque[memoryview] = deque()
        self._flushing = False
        source = agent_source(0 if starter or link else os.getpid())
        if link is None:
            link = ProcessLink(agent_command(name, starter, len(source)), starter)
        self.link = link
        self.pid = link.pid  # of the starter's command, where the agent is elsewhere
        self._write(source)

    # -- descriptors -----------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        """Whether it may be on another machine."""
        return self.link.remote

    @property
    def unsent(self) -> bool:
        """Whether commands wait for room in the pipe."""
        return bool(self._commands) or self.link.unsent

    def read(self) -> list[Event]:
        """What has happened since the last call."""
        try:
            data = self.link.read()
        except BlockingIOError:
            return []
        if not data:
            while self.read_errors():
                pass
            return [AgentEnded(self.finished)]
        events: list[Event] = []
        for kind, worker, content in self._reader.feed(data):
            if kind != EVENT:
                events.append(Output(worker, STREAMS[kind], content))
                continue
            for name, value in json.loads(content).items():
                events.append(AgentEvent(name, value))
                if name == "hello":
                    self.hello = value
                self.finished |= name == "finished"
        return events

    def read_errors(self) -> bool:
        """Keep what the starter or the agent complains about; False when there is no more."""
        try:
            data = self.link.read_errors()
        except BlockingIOError:
            return False
        self._errors = (self._errors + data)[-_KEPT_ERRORS:]
        return bool(data)

    @property
    def last_words(self) -> str:
        """Last error text from the starter's command, the remote shell or the agent."""
        said = self._errors or (b"" if self.hello else self._reader.before)
        return said.decode(errors="replace").replace("\r", "").strip()

    def explain_end(self, code: int) -> str:
        """Why the agent has ended, as far as anybody has said it; `code` is its exit code."""
        return self.last_words or f"{self.link.describe_end(code)} and no message"

    # -- commands --------------------------------------------------------------------------

    def start(
        self,
        workers: Sequence[WorkerSpec],
        env: Mapping[str, str],
    ) -> None:
        """Start workers with ``env`` and each its own; the link says what the host itself gives."""
        described = [
            {
                "id": worker.id,
                "argv": [_text(each) for each in worker.argv],
                "env": _texts(worker.env),
                "cwd": _text(worker.cwd),
                "bind": worker.bind,
                "input": worker.input,
            }
            for worker in workers
        ]
        self._command({"start": described, "env": _texts(env), "own": self.link.keeps})

    def stop(self, grace: float, ids: Sequence[int] | None = None, interrupt: bool = False) -> None:
        """SIGTERM now and SIGKILL after ``grace`` seconds; 0 kills at once. Safe in a handler.

        Without ``ids`` all workers are meant, and everything that they have left behind. With
        ``interrupt`` SIGINT comes first, and SIGTERM shortly before the end.
        """
        which = {} if ids is None else {"ids": list(ids)}
        self._command({"stop": grace, "interrupt": interrupt, **which})

    def feed(self, worker: int, data: bytes) -> None:
        """More for the stdin of a worker that takes input; no data stands for the end."""
        self._command({"input": worker, "data": base64.b64encode(data).decode()})

    def probe(self, request: Mapping[str, Any]) -> None:
        """Ask for the ways from that host (see `probe`); the answer is the event "probed"."""
        self._command({"probe": {**request, "modules": _packed("probe")}})

    def ask_for_stack(self, worker: int, pid: int) -> None:
        """Ask where a worker is in its code (see `stack`); the answer is the event "stack"."""
        self._command({"stack": {"id": worker, "pid": pid, "modules": _packed("stack")}})

    def finish(self) -> None:
        """No more workers will be started: the agent ends when nothing is left."""
        self.is_dismissed = True
        self._command({"close": True})

    def flush(self) -> None:
        """Write as many commands as the pipe takes.

        A signal handler may call this while the main program is inside: it then leaves the
        work to the call that it interrupted.
        """
        while self.unsent and not self._flushing:
            self._flushing = True
            try:
                self.link.flush()
                if self._commands:  # a handler may just have done it
                    written = self.link.write(self._commands[0])
                    rest = self._commands.popleft()[written:]
                    if rest:
                        self._commands.appendleft(rest)
            except BlockingIOError:
                return
            except (BrokenPipeError, ValueError):  # it has ended: `read` says so
                self._commands.clear()
            finally:
                self._flushing = False

    def abandon(self) -> None:
        """Give up a host that has not answered yet."""
        self.link.abandon()

    def _command(self, command: Mapping[str, Any]) -> None:
        self._write(json.dumps(command).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        self._commands.append(memoryview(data))
        self.flush()


def agent_command(name: str, starter: Starter | None, length: int | None = None) -> list[str]:
    """What to execute here for an agent on a host; its source follows on stdin.

    The Python program has no character that would be special to a shell inside single quotes.
    """
    length = len(agent_source(0)) if length is None else length
    python = [sys.executable, *agent_arguments(length)]
    return starter.command(name, python) if starter else python


def agent_arguments(length: int) -> list[str]:
    """The arguments with which Python runs a program of this many bytes from its stdin."""
    program = (
        f'import os;s=b"";exec("while len(s)<{length}:'
        f's+=os.read(0,{length}-len(s))or os._exit({NO_INPUT})");exec(s)'
    )
    return ["-I", "-S", "-X", "utf8", "-c", program, "horovodrun-agent"]


def agent_source(parent: int) -> bytes:
    return _agent_prelude() + f"main({parent})\n".encode()


@functools.cache
def _agent_prelude() -> bytes:
    packed = _packed(*_AGENT_MODULES)
    load = f"load_modules({packed!a})\nfrom horovod.runner.agents.agent import main\n"
    (source,) = (source for name, source, _ in packed[1] if name.endswith(".bootstrap"))
    return f"{source}\n{load}".encode()


@functools.cache
def _packed(*names: str) -> Packed:
    return pack_modules(*(f"horovod.runner.agents.{name}" for name in names))


def _text(value: str) -> str:
    """As UTF-8 would have decoded it, which is what the agent does everywhere."""
    return os.fsencode(value).decode("utf-8", "surrogateescape")


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in values.items()}
