"""One host of a job, seen from the launcher: its agent, and the pipes to it.

Both kinds of job and `host_check` call `start_agent` for each host, and `dry_run` shows
`start_command`; `supervise` waits for the descriptors of a `HostAgent` and takes its events.
Nothing here blocks, and there are no threads: each host needs three descriptors. See `agent` for
the other side, and `starters` for the commands that lead to other machines.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from horovod.runner.agents.agent_streams import (
    EVENT,
    STREAMS,
    FrameReader,
    command_frame,
)
from horovod.runner.agents.channel import ChannelLink
from horovod.runner.agents.starters import (
    ProcessLink,
    Starter,
    agent_command,
    agent_source,
    packed_modules,
)
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import is_local

_KEPT_ERRORS = 8000


@dataclass(frozen=True)
class WorkerSpec:
    """Describes one worker: in what it differs from the others of its host."""

    id: int  # unique in the job
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    bind: tuple[str, int, int] | None = None  # kind, index, count: `local_host.share_of_cores`
    input: bool = False  # whether `feed` brings its stdin; otherwise it has none


class AgentEvent(NamedTuple):
    """An event from an agent: one of the kinds listed in `agent`, or one of these two.

    - ``output``: a worker, its stream ("stdout" or "stderr"), and the bytes that it wrote, of which
      there are none when it has closed the stream.
    - ``ended``: the agent, or the connection to it, has ended. The content is true if nothing is
      left there.
    """

    kind: str
    content: Any


class HostAgent:
    """The agent of one host."""

    def __init__(
        self, name: str, starter: Starter | None = None, link: ChannelLink | None = None
    ) -> None:
        """Start the agent.

        Args:
            name: The host's name.
            starter: The command that leads to another machine.
            link: A connection that the host has opened, instead of a starter. With neither, the
                agent runs on this machine.

        Raises:
            OSError: If the agent or the starter's command cannot be started.
        """
        self.name = name
        self.starter = starter
        self.silent_checks = 0  # checks since its last sign of life: see `Supervisor`
        self.hello: Mapping[str, Any] | None = None  # what it said about its host
        self.finished = False  # it said that nothing is left
        self.is_dismissed = False  # we have told it to end
        self.given_up = ""  # the reason why we have ended the connection, if it did not answer
        self._reader = FrameReader()
        self._errors = b""
        self._commands: deque[memoryview] = deque()
        self._flushing = False
        source = agent_source(0 if starter or link else os.getpid())
        if link is not None:
            link.announce_agent(len(source))
        self.link = link or ProcessLink(agent_command(name, starter), starter)
        self.pid = self.link.pid  # of the starter's command, where the agent is elsewhere
        self._write(source)

    # -- descriptors -----------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        """Whether it may be on another machine."""
        return self.link.remote

    @property
    def cores(self) -> int:
        """The number of cores that its workers may use together; only after it has answered."""
        return int((self.hello or {})["cores"])

    @property
    def unsent(self) -> bool:
        """Whether commands wait for room in the pipe."""
        return bool(self._commands) or self.link.unsent

    def read(self) -> list[AgentEvent]:
        """Return the events since the last call."""
        try:
            data = self.link.read()
        except BlockingIOError:
            return []
        self.silent_checks = 0
        if not data:
            while self.read_errors():
                pass
            return [AgentEvent("ended", self.finished)]
        events = []
        for kind, worker, content in self._reader.feed(data):
            if kind != EVENT:
                events.append(AgentEvent("output", (worker, STREAMS[kind], content)))
                continue
            for name, value in json.loads(content).items():
                events.append(AgentEvent(name, value))
                if name == "hello":
                    self.hello = value
                self.finished |= name == "finished"
        return events

    def read_errors(self) -> bool:
        """Keep error text of the starter or the agent; return False when there is no more."""
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
        """Return why the agent has ended, for people; `code` is its exit code."""
        said = self.last_words
        if self.given_up:
            return f"{self.given_up}:\n{said}" if said else self.given_up
        said = said or f"{self.link.describe_end(code)} and no message"
        return f"\n{said}" if "\n" in said else said

    def describe_end(self, code: int) -> str:
        """Return the way in which the agent has ended, without what it said last."""
        return self.given_up or self.link.describe_end(code)

    # -- commands --------------------------------------------------------------------------

    def start(self, workers: Sequence[WorkerSpec], env: Mapping[str, str]) -> None:
        """Start workers.

        Args:
            workers: The workers, each with variables of its own.
            env: Variables that all of them get. The link says which come from the host itself.
        """
        described = [
            {
                **vars(worker),
                "argv": [_text(each) for each in worker.argv],
                "env": _texts(worker.env),
                "cwd": _text(worker.cwd),
            }
            for worker in workers
        ]
        self._command({"start": described, "env": _texts(env), "own": self.link.own_variables})

    def stop(self, grace: float, ids: Sequence[int] | None = None, interrupt: bool = False) -> None:
        """End workers. A signal handler may call this.

        Args:
            grace: Seconds between SIGTERM and SIGKILL; 0 kills at once.
            ids: The workers to end; by default all, and everything that they have left behind.
            interrupt: Whether SIGINT comes first, and SIGTERM only shortly before SIGKILL.
        """
        which = {} if ids is None else {"ids": list(ids)}
        self._command({"stop": grace, "interrupt": interrupt, **which})

    def feed(self, worker: int, data: bytes) -> None:
        """Send data to the stdin of a worker that takes input; empty data closes it."""
        self._command({"input": worker, "data": data})

    def probe(self, request: Mapping[str, Any]) -> None:
        """Ask which addresses the host can reach (see `probe`); "probed" is the answer."""
        self._command({"probe": {**request, "modules": packed_modules("probe")}})

    def ask_for_stack(self, worker: int, pid: int) -> None:
        """Ask for a worker's Python stack (see `stack`); the event "stack" is the answer."""
        self._command({"stack": {"id": worker, "pid": pid, "modules": packed_modules("stack")}})

    def sweep(self, agent: int, workers: Sequence[int], mark: str) -> None:
        """Let the agent end what another has left on its host: see `local_host.end_leftovers`."""
        self._command({"sweep": {"agent": agent, "workers": list(workers), "mark": mark}})

    def finish(self) -> None:
        """Start no more workers; the agent then ends when none is left."""
        self.is_dismissed = True
        self._command({"close": True})

    def dismiss(self, grace: float | None = None, interrupt: bool = False) -> None:
        """Let the agent end, or give up a host that has not answered yet.

        Args:
            grace: Seconds for its workers to end; by default they end by themselves.
            interrupt: Whether they get SIGINT first: see `stop`.
        """
        if self.hello is None and self.remote and not self.is_dismissed:
            self.abandon()
            return
        if grace is not None:
            self.stop(grace, interrupt=interrupt)
        self.finish()

    def flush(self) -> None:
        """Write as many commands as the pipe takes.

        A signal handler may call this while the main program runs it. Then it returns at once, and
        the interrupted call writes the handler's commands too.
        """
        while self.unsent and not self._flushing:
            self._flushing = True
            try:
                self.link.flush()
                if self._commands:  # a signal handler may have sent them just before `_flushing`
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

    def give_up(self, why: str) -> None:
        """Abandon a host; `explain_end` then gives this reason."""
        self.given_up = why
        self.abandon()

    def _command(self, command: dict[str, Any]) -> None:
        self._write(command_frame(command))

    def _write(self, data: bytes) -> None:
        self._commands.append(memoryview(data))
        self.flush()


def _text(value: str) -> str:
    """Return the value as UTF-8 decodes its bytes, because the agent always uses UTF-8."""
    return os.fsencode(value).decode("utf-8", "surrogateescape")


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in values.items()}


def start_command(name: str, starter: Starter) -> list[str]:
    """Return the command that starts a host's agent."""
    return agent_command(name, None if is_local(name) else starter)


def start_agent(name: str, starter: Starter) -> HostAgent:
    """Start the agent of a host: directly on this machine, elsewhere by the starter.

    Raises:
        LaunchError: If the command cannot be started, with the reason.
    """
    try:
        return HostAgent(name, None if is_local(name) else starter)
    except ValueError as error:
        raise LaunchError(str(error), status=2) from None
    except FileNotFoundError as error:
        why = f"there is no program {error.filename!r} here"
        raise LaunchError(why, status=127) from None
    except OSError as error:
        raise LaunchError(str(error.strerror)) from None
