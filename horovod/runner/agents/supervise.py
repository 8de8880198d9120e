"""The launcher's loop: agents, their workers' output, signals and timers, in one thread.

A job adds its agents with `Supervisor.add` and calls `run` with a `Handler`, which says what to do
when a host is ready, a worker ends or a host is lost: `controller.JobController` is one, and the
check of hosts another. The loop sleeps until something happens.
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

from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.output.console import Colour, Console
from horovod.runner.output.outputs import Outputs
from horovod.runner.output.watcher import JobWatcher

FAILURE_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the other workers after one has failed."""

INTERRUPT_GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL after Ctrl-C or SIGTERM: time to write a checkpoint."""

_SAME_REQUEST = 5.0
"""Seconds within which a second SIGTERM is the same request as the first.

A batch system signals every process of a preempted job, and the job's script then does what its
trap says: it passes the signal on. The workers must not lose their time for a checkpoint by that.
"""

_SILENCE_CHECK = 30.0
"""Seconds between checks whether agents give signs of life, which they do as often."""

_MOST_SILENT_CHECKS = 10
"""Checks without a sign of life after which an agent counts as lost: it is stopped, or hangs.

Checks are counted and not seconds: this process may have been stopped itself.
"""

_KILL_PATIENCE = 3.0
_STACKS_TICK = 1.0  # seconds between checks whether the watcher asks for stacks
_CHUNK = 1 << 16
_STDIN = 0


class Handler(Protocol):
    """The part of a job that reacts to events. The loop makes all calls."""

    def ready(self, agent: HostAgent) -> None:
        """React to an agent that runs; ``agent.hello`` describes its host."""

    def probed(self, agent: HostAgent, answer: dict[str, Any]) -> None:
        """React to the answer to ``agent.probe``."""

    def started(self, agent: HostAgent, worker: int, pid: int) -> None:
        """React to a worker that runs."""

    def failed(self, agent: HostAgent, worker: int, number: int, what: str) -> None:
        """React to a worker that could not be started: an errno, and the file concerned."""

    def exited(self, agent: HostAgent, exits: Sequence[tuple[int, int]]) -> None:
        """React to workers found dead at the same moment: ids, and codes, negative for signals."""

    def lost(self, agent: HostAgent, code: int) -> None:
        """React to an agent, or a connection to it, that ended although we did not tell it to.

        ``agent.finished`` is true if somebody else, such as a batch system, told it to end and it
        has left nothing behind. ``code`` is its exit code.
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
        """Prepare the loop.

        Args:
            console: Where messages for people go.
            outputs: What takes the workers' output.
            pass_interrupts_on: Whether Ctrl-C reaches the workers as SIGINT instead of SIGTERM.
            watcher: What may ask for stacks of workers; nothing by default.
        """
        self.console = console
        self._pass_interrupts_on = pass_interrupts_on
        self.signals: list[int] = []  # the signals that the launcher got, in order
        self._last_signal = 0.0  # when the last of them came
        self.stopping = False
        self.awaits_agents = False  # whether the loop goes on without agents, as some may come
        self._outputs = outputs
        self._agents: list[HostAgent] = []
        self._writing: set[HostAgent] = set()  # the agents whose pipes are full
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
        """Watch this agent from now on."""
        self._agents.append(agent)
        self.watch(agent.link.output_fd, lambda: self._take(agent))
        errors_fd = agent.link.errors_fd
        if errors_fd is not None:
            self.watch(errors_fd, lambda: self._take_errors(agent, errors_fd))
        if self.signals:  # one came while this agent was being started
            agent.dismiss(INTERRUPT_GRACE, self._is_interrupted)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever the descriptor is readable."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` from the loop after this time, if the loop still runs."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), callback))

    def stop(self, grace: float) -> None:
        """End all workers on all hosts, and then the agents."""
        if not self.stopping:
            self.stopping = True
            for agent in self._agents:
                agent.dismiss(grace)

    def run(self, handler: Handler) -> None:
        """Run the loop until all agents have ended.

        With `awaits_agents` it goes on without agents, until the job is stopped.
        """
        self._handler = handler
        if self._watcher.wants_stacks:
            self.call_later(_STACKS_TICK, self._ask_for_stacks)
        self.call_later(_SILENCE_CHECK, self._give_up_silent_agents)
        with self._signals_wake_us():
            while self._agents or (self.awaits_agents and not self.stopping and not self.signals):
                self._mind_unsent_commands()
                # There always is a timer: the next look for silent agents.
                patience = self._timers[0][0] - time.monotonic()
                for key, _ in self._selector.select(max(0.0, patience)):
                    key.data()
                while self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[2]()
                if self.console.broken:
                    self.stop(FAILURE_GRACE)
        self._outputs.finish()
        self.console.finish()

    def close(self) -> None:
        """Release the agents that are left, which then end their workers, and wait for them."""
        agents, self._agents = self._agents, []
        for agent in agents:
            if agent.hello is None and agent.remote:
                agent.abandon()
            agent.link.release()
        for agent in agents:  # all are released before the first wait, so that they end together
            agent.link.wait()
        self._selector.close()

    # -- agents ----------------------------------------------------------------------------

    def _give_up_silent_agents(self) -> None:
        for agent in self._agents:
            agent.silent_checks += 1
            if agent.hello is not None and agent.silent_checks > _MOST_SILENT_CHECKS:
                minutes = _MOST_SILENT_CHECKS * _SILENCE_CHECK / 60
                agent.give_up(f"its agent has given no sign of life for {minutes:g} minutes")
        self.call_later(_SILENCE_CHECK, self._give_up_silent_agents)

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
            return  # it was removed earlier in this turn of the loop
        for event in agent.read():
            self._take_event(agent, *event)

    def _take_event(self, agent: HostAgent, kind: str, content: Any) -> None:
        handler = self._handler
        assert handler is not None
        if kind == "output":
            self._outputs.take(*content)
        elif kind == "ended":
            self._remove(agent, content)
        elif kind == "hello":
            handler.ready(agent)
        elif kind == "probed":
            handler.probed(agent, content)
        elif kind == "started":
            self._agent_of[content["id"]] = agent
            handler.started(agent, content["id"], content["pid"])
        elif kind == "failed":
            handler.failed(agent, content["id"], content["errno"], content["what"])
        elif kind == "exited":
            handler.exited(agent, [(worker, code) for worker, code in content])
        elif kind == "stack":
            self._watcher.note("stack", worker=content["id"], text=content["text"])
        elif kind == "note":
            self._note(f"{agent.name}: {content}")
        elif kind == "stuck":
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

    def _take_errors(self, agent: HostAgent, fd: int) -> None:
        if agent in self._agents and not agent.read_errors():
            self.unwatch(fd)

    def _remove(self, agent: HostAgent, finished: bool) -> None:
        assert self._handler is not None
        # Before `release` closes the descriptors: their numbers are used again.
        for fd in (agent.link.input_fd, agent.link.output_fd, agent.link.errors_fd):
            if fd is not None:
                self.unwatch(fd)
        self._agents.remove(agent)
        self._writing.discard(agent)
        agent.link.release()
        code = agent.link.wait()
        if not finished or not agent.is_dismissed:
            self._handler.lost(agent, code)

    @property
    def _is_interrupted(self) -> bool:
        return self._pass_interrupts_on and self.signals[:1] == [signal.SIGINT]

    # -- stdin -----------------------------------------------------------------------------

    def attach(self, agent: HostAgent, worker: int) -> None:
        """Pass on what arrives at our stdin to a worker's stdin."""

        def pass_on() -> bool:
            try:
                data = os.read(_STDIN, _CHUNK)
            except OSError:
                data = b""  # it is closed, or we may not read it: take that for its end
            agent.feed(worker, data)
            if not data:
                self.unwatch(_STDIN)
            return bool(data)

        try:
            self.watch(_STDIN, pass_on)
        except (OSError, ValueError):  # an ordinary file cannot be waited for: read it at once
            while pass_on():
                pass

    # -- signals ---------------------------------------------------------------------------

    @contextmanager
    def _signals_wake_us(self) -> Iterator[None]:
        """Let signals end the whole job and not just the launcher.

        Users of Slurm choose SIGUSR1 as the warning that their time is nearly over.
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
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: leave that
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
        # Stop workers in the handler, because a paused terminal (Ctrl-S) may block the loop.
        now = time.monotonic()
        repeated = number == signal.SIGTERM and number in self.signals[-1:]
        if repeated and now - self._last_signal < _SAME_REQUEST:
            return
        self._last_signal = now
        self.signals.append(number)
        self._outputs.interrupted = self._is_interrupted
        for agent in list(self._agents):
            if len(self.signals) == 1:
                agent.dismiss(INTERRUPT_GRACE, self._is_interrupted)
            else:
                agent.dismiss(0)

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
        """Give up hosts that do not answer, so that a person in a hurry need not wait for them."""
        for agent in self._agents:
            if agent.remote:
                agent.abandon()


def raise_descriptor_limit(needed: int) -> None:
    """Raise this process's limit of descriptors to ``needed``, or to the most that is allowed.

    Children inherit the limit.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
