"""Messages from other threads to the driver's loop, which wakes up for them.

Two threads leave messages in a `Mailbox`: the store's, when a worker has answered a decision, and
the poller's, when it has asked which hosts there are. The driver's `Inbox` takes them in the loop's
thread and notes them in the job's state, so that this state needs no lock.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from horovod.common.generations.decisions import answer_key, parse_answer
from horovod.common.store import MemoryStore
from horovod.observe.reports.amounts import count_of
from horovod.runner.elastic.discovery import HostManager, HostPoller, NoMoreHosts
from horovod.runner.elastic.job_state import JobState, Process, number_of
from horovod.runner.elastic.liveness import DecisionLog, Liveness
from horovod.runner.output.console import Console
from horovod.runner.output.watcher import Status


class Mailbox:
    """A queue of messages. Any thread may `post`; the owner watches `descriptor`."""

    def __init__(self) -> None:
        self._messages: deque[tuple[str, Any]] = deque()
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when there is a message."""
        return self._wakeup.fileno()

    def post(self, kind: str, content: Any) -> None:
        """Leave a message, from any thread."""
        self._messages.append((kind, content))
        # The socket may be full of earlier wake-ups, which suffice, or be closed at the end.
        with suppress(OSError):
            self._waker.send(b"\0")

    def take_all(self) -> list[tuple[str, Any]]:
        """Return the messages that have arrived, in order."""
        # The wake-ups go first: a message that is posted after this line wakes the loop again.
        with suppress(BlockingIOError):
            self._wakeup.recv(1 << 12)
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def close(self) -> None:
        """Close the descriptors; later messages are ignored."""
        self._wakeup.close()
        self._waker.close()


class Inbox(Mailbox):
    """Takes the answers of workers and of the discovery of hosts into the job's state."""

    def __init__(
        self,
        state: JobState,
        store: MemoryStore,
        manager: HostManager,
        console: Console,
        status: Status,
        decisions: DecisionLog,
        liveness: Liveness,
        finish: Callable[[Process], None],
    ) -> None:
        """Prepare to take messages; `finish` is called for each worker that has finished."""
        super().__init__()
        self._state = state
        self._store = store
        self._manager = manager
        self._console = console
        self._status = status
        self._decisions = decisions
        self._liveness = liveness
        self._finish = finish
        self._poller: HostPoller | None = None
        self._last_problem = ""  # the last problem with discovery

    def open(self, pause: float) -> None:
        """Watch the store's keys, and begin to ask for hosts, `pause` seconds after each answer."""
        self._store.watch(self._on_key)
        self._poller = HostPoller(self._manager.discovery, partial(self.post, "hosts"), pause)

    def stop_polling(self) -> None:
        """Ask for hosts no more."""
        if self._poller is not None:
            self._poller.close()

    def note_all(self) -> bool:
        """Note all messages in the state; return whether something may follow from them."""
        changed = False
        for kind, content in self.take_all():
            changed |= self._take_hosts(content) if kind == "hosts" else self._take_answer(*content)
        return changed

    def _on_key(self, key: str) -> None:
        answer = parse_answer(key)
        if answer is not None:
            self.post("answer", answer)

    def _take_hosts(self, answer: dict[str, int] | Exception) -> bool:
        state = self._state
        if isinstance(answer, Exception):
            self._status.note("discovery failed", reason=str(answer))
            if isinstance(answer, NoMoreHosts):
                state.no_hosts = str(answer)
            elif not state.hosts_known:
                state.no_hosts = f"cannot find out which hosts there are: {answer}"
            elif str(answer) != self._last_problem:
                self._last_problem = str(answer)
                self._console.say(f"going on with the known hosts: {answer}")
            return bool(state.no_hosts)
        before = self._manager.current_hosts
        changed = self._manager.take(answer)
        if not changed and state.hosts_known:
            return False
        state.hosts_known = True
        self._last_problem = ""
        for host in before.host_slots:
            if state.number and host not in answer and state.workers_on(host):
                state.causes.append(f"{host} is not available any more")
        self._status.note("hosts", hosts=answer)
        return True

    def _take_answer(self, kind: str, number: int, worker: str) -> bool:
        """Note what a worker has written to the store."""
        if kind == "formed":
            self._take_formed(number)
            return True
        process, status = self._state.alive.get(number_of(worker)), self._status
        if process is None:
            return False
        if kind == "ready":
            process.ready_at = process.ready_at or time.monotonic()
            status.note("ready", worker=worker, host=process.host)
        elif kind == "heard":
            process.heard = max(process.heard, number)
            status.note("heard", worker=worker, decision=number)
        elif kind == "seen":
            attempt = int(self._store.try_get(answer_key("seen", number, worker)) or 0)
            status.note("entered", worker=worker, decision=number, attempt=attempt)
            self._state.note_entry(process, number, attempt)
            self._liveness.note_entry(*process.entered)
        elif kind == "broken":
            why = self._store.try_get(answer_key("broken", number, worker)) or b""
            status.note("broken", worker=worker, decision=number, why=why.decode(errors="replace"))
        elif kind == "met":
            process.has_met = True
        elif kind == "received":
            status.note("received", worker=worker)
            process.has_state = True
        elif kind == "done" and not process.is_done:
            status.note("done", worker=worker)
            process.is_done = True
            self._finish(process)
        elif kind == "leaving" and not process.is_leaving:
            status.note("leaving", worker=worker)
            process.is_leaving = True
            if process.number in self._state.placed_workers:
                self._state.departed_workers.append(process.number)
            elif process.joined is not None:  # a decision has left it out, and it has handed over
                return True
            self._manager.give_back(process.host)
            self._state.causes.append(f"{process} leaves, as it was told to")
        return kind not in ("heard", "seen", "broken")

    def _take_formed(self, number: int) -> None:
        state = self._state
        if number != state.number or not state.last_formed:
            self._status.note("formed", decision=number)
        else:
            now, ranks = time.monotonic(), len(state.placed_workers)
            seconds = now - (state.forming_since or now)
            text = f"re-formed with {count_of(ranks, 'rank')} in {seconds:.1f} s"
            self._status.announce(text, "formed", decision=number, ranks=ranks, seconds=seconds)
        state.mark_formed(number)
        if state.is_formed:
            self._decisions.forget_old()
