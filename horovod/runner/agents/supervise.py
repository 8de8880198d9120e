"""The launcher's loop: agents, their workers' output, signals and timers, in one thread.

A job puts its agents in with `Supervisor.add`, gives a `Handler` (its policy: what to do when a
host is ready, a worker ends, a host is lost) and calls `run`. Both kinds of job use it: the fixed
one of `static_job` and the elastic driver. The loop sleeps until something happens.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from horovod.runner.agents.host_agent import AgentEnded, AgentEvent, HostAgent, Output
from horovod.runner.output.colours import Colour
from horovod.runner.output.console import Console
from horovod.runner.output.outputs import Outputs
from horovod.runner.output.watcher import JobWatcher

FAILURE_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the other workers after one has failed."""

INTERRUPT_GRACE = 30.0
"""The same after Ctrl-C or SIGTERM: time to write a checkpoint."""

_KILL_PATIENCE = 3.0
_STACKS_TICK = 1.0  # seconds between looks whether the watcher asks for stacks
_CHUNK = 1 << 16


class Handler(Protocol):
    """What a job does when something happens. All calls come from the loop."""

    def ready(self, agent: HostAgent) -> None:
        """The agent runs; ``agent.hello`` tells about its host."""

    def probed(self, agent: HostAgent, answer: dict[str, Any]) -> None:
        """The answer to ``agent.probe``."""

    def started(self, agent: HostAgent, worker: int, pid: int) -> None:
        """A worker runs."""

    def failed(self, agent: HostAgent, worker: int, number: int, what: str) -> None:
        """A worker could not be started: an errno, and the file concerned."""

    def exited(self, agent: HostAgent, exits: Sequence[tuple[int, int]]) -> None:
        """Workers were found dead at the same moment: id and code, negative for signals."""

    def lost(self, agent: HostAgent, code: int) -> None:
        """The agent, or the connection to it, ended without being told; ``code`` is its own.

        ``agent.finished`` where it was somebody else, such as a batch system, who told it, and it
        has left nothing behind.
        """


class Supervisor:
    """Drives a job until none of its agents is left."""

    def __init__(
        self,
        console: Console,
        outputs: Outputs,
        pass_interrupts_on: bool = False,
        watcher: JobWatcher | None = None,
    ) -> None:
        """``pass_interrupts_on``: Ctrl-C is SIGINT for the workers, and not SIGTERM.

        ``watcher`` may ask where workers are in their code.
        """
        self.console = console
        self._pass_interrupts_on = pass_interrupts_on
        self.signals: list[int] = []  # what the launcher got, in this order
        self.stopping = False
        self.held = False  # run on without any agent: some may come
        self._outputs = outputs
        self._agents: list[HostAgent] = []
        self._writing: set[HostAgent] = set()  # those whose pipe is full
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._notes: set[str] = set()
        self._announced = 0
        self._selector = selectors.DefaultSelector()
        self._handler: Handler | None = None
        self._watcher = watcher or JobWatcher()
        self._agent_of: dict[int, HostAgent] = {}  # by worker

    # -- for the job -----------------------------------------------------------------------

    def add(self, agent: HostAgent) -> None:
        """From now on watch this agent."""
        self._agents.append(agent)
        self.watch(agent.link.output_fd, lambda: self._take(agent))
        if agent.link.errors_fd is not None:
            self.watch(agent.link.errors_fd, lambda: self._take_errors(agent))
        if self.signals:  # came while it was started
            self._stop_agent(agent, INTERRUPT_GRACE, self._is_interrupted)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back whenever the descriptor is readable."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back from the loop after this time, if it still runs."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), callback))

    def stop(self, grace: float) -> None:
        """End all workers on all hosts, and then the agents."""
        if not self.stopping:
            self.stopping = True
            for agent in self._agents:
                self._stop_agent(agent, grace)

    def run(self, handler: Handler) -> None:
        """Until all agents have ended; where the job is held, until it is stopped as well."""
        self._handler = handler
        if self._watcher.wants_stacks:
            self.call_later(_STACKS_TICK, self._ask_for_stacks)
        with self._signals_wake_us():
            while self._agents or (self.held and not self.stopping and not self.signals):
                self._mind_unsent_commands()
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._call_due()
                if self.console.broken:
                    self.stop(FAILURE_GRACE)
        self._outputs.finish()
        self.console.finish()

    def close(self) -> None:
        """Let go of agents that are left, which then end their workers, and wait for them."""
        agents, self._agents = self._agents, []
        for agent in agents:
            if agent.hello is None and agent.remote:
                agent.abandon()
            agent.link.release()
        for agent in agents:
            agent.link.wait()
        self._selector.close()

    # -- agents ----------------------------------------------------------------------------

    def _mind_unsent_commands(self) -> None:
        for agent in self._agents:
            if agent.unsent and agent not in self._writing:
                self._writing.add(agent)
                self._selector.register(agent.link.input_fd, selectors.EVENT_WRITE, agent.flush)
            elif agent in self._writing and not agent.unsent:
                self._writing.remove(agent)
                self._selector.unregister(agent.link.input_fd)

    def _take(self, agent: HostAgent) -> None:
        if agent not in self._agents:
            return
        for event in agent.read():
            if isinstance(event, Output):
                self._outputs.take(event.worker, event.stream, event.data)
            elif isinstance(event, AgentEnded):
                self._remove(agent, event.finished)
            else:
                self._pass_on(agent, event)

    def _pass_on(self, agent: HostAgent, event: AgentEvent) -> None:
        handler, content = self._handler, event.content
        assert handler is not None
        if event.kind == "hello":
            handler.ready(agent)
        elif event.kind == "probed":
            handler.probed(agent, content)
        elif event.kind == "started":
            self._agent_of[content["id"]] = agent
            handler.started(agent, content["id"], content["pid"])
        elif event.kind == "failed":
            handler.failed(agent, content["id"], content["errno"], content["what"])
        elif event.kind == "exited":
            handler.exited(agent, [(worker, code) for worker, code in content])
        elif event.kind == "stack":
            self._watcher.note("stack", worker=content["id"], text=content["text"])
        elif event.kind == "note":
            self._note(f"{agent.name}: {content}")
        elif event.kind == "stuck":
            pids = ", ".join(map(str, content))
            self._note(f"{agent.name}: these processes did not end even after SIGKILL: {pids}")

    def _ask_for_stacks(self) -> None:
        for wanted in self._watcher.wanted_stacks():
            agent = self._agent_of.get(wanted.worker)
            if agent in self._agents:
                agent.ask_for_stack(wanted.worker, wanted.pid)
        self.call_later(_STACKS_TICK, self._ask_for_stacks)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self.console.say(text)

    def _take_errors(self, agent: HostAgent) -> None:
        if agent in self._agents and not agent.read_errors():
            fd = agent.link.errors_fd
            assert fd is not None, "nobody watches what is not there"
            self.unwatch(fd)

    def _remove(self, agent: HostAgent, finished: bool) -> None:
        assert self._handler is not None
        for fd in (agent.link.input_fd, agent.link.output_fd, agent.link.errors_fd):
            if fd is not None:
                self.unwatch(fd)
        self._agents.remove(agent)
        self._writing.discard(agent)
        agent.link.release()
        code = agent.link.wait()
        if not finished or not agent.is_dismissed:
            self._handler.lost(agent, code)

    def _stop_agent(self, agent: HostAgent, grace: float, interrupt: bool = False) -> None:
        if agent.hello is None and agent.remote:
            agent.abandon()
        else:
            agent.stop(grace, interrupt=interrupt)
            agent.finish()

    @property
    def _is_interrupted(self) -> bool:
        return self._pass_interrupts_on and self.signals[:1] == [signal.SIGINT]

    # -- stdin -----------------------------------------------------------------------------

    def attach(self, agent: HostAgent, worker: int, fd: int = 0) -> None:
        """From now on a worker's stdin is what comes at this descriptor of ours."""

        def pass_on() -> bool:
            try:
                data = os.read(fd, _CHUNK)
            except OSError:
                data = b""  # closed, or not ours to read: as if it had ended
            agent.feed(worker, data)
            if not data:
                self.unwatch(fd)
            return bool(data)

        try:
            self.watch(fd, pass_on)
        except (OSError, ValueError):  # a file can always be read, and cannot be waited for
            while pass_on():
                pass

    # -- timers ----------------------------------------------------------------------------

    def _patience(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _call_due(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    # -- signals ---------------------------------------------------------------------------

    @contextmanager
    def _signals_wake_us(self) -> Iterator[None]:
        """Signals end the job and not just the launcher.

        SIGUSR1 is what users of Slurm choose to be told that their time is nearly over.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may have handlers
            return
        wakeup, waker = socket.socketpair()
        wakeup.setblocking(False)
        waker.setblocking(False)
        self.watch(wakeup.fileno(), lambda: self._announce(wakeup))
        old_waker = signal.set_wakeup_fd(waker.fileno())
        old = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asked for this
                old[number] = signal.signal(number, self._interrupt)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_waker)
            self.unwatch(wakeup.fileno())
            wakeup.close()
            waker.close()

    def _interrupt(self, number: int, _frame: object) -> None:
        # Here and not in the loop, which may be blocked writing to a terminal that is paused.
        self.signals.append(number)
        self._outputs.interrupted = self._is_interrupted
        for agent in list(self._agents):
            if len(self.signals) == 1:
                self._stop_agent(agent, INTERRUPT_GRACE, self._is_interrupted)
            else:
                self._stop_agent(agent, 0)

    def _announce(self, wakeup: socket.socket) -> None:
        wakeup.recv(64)
        if not self.signals or not self._agents:
            return
        if self._announced == 0:
            name = signal.Signals(self.signals[0]).name
            self.console.say(
                f"got {name}: asked the workers to end, and waiting up to {INTERRUPT_GRACE:.0f} s; "
                f"once more kills them at once",
                Colour.ATTENTION,
            )
        if self._announced < 2 <= len(self.signals):
            self.console.say("killing the workers", Colour.ATTENTION)
            self.call_later(_KILL_PATIENCE, self._abandon_agents)
        self._announced = len(self.signals)

    def _abandon_agents(self) -> None:
        """Hosts that do not answer any more must not hold up a person who is in a hurry."""
        for agent in self._agents:
            if agent.remote:
                agent.abandon()


def raise_descriptor_limit(needed: int) -> None:
    """Let this process have this many descriptors, where it may. Its children inherit it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
