"""The parts of an elastic driver, put together as the driver does, for tests of one of them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from horovod.common.generations.decisions import Decision
from horovod.common.store import MemoryStore
from horovod.common.topology import Slot
from horovod.runner.agents.controller import HostSet
from horovod.runner.elastic.discovery import FixedHosts, HostManager
from horovod.runner.elastic.job_state import JobState, Limits, Process
from horovod.runner.elastic.liveness import DecisionLog, Failures, Liveness
from horovod.runner.elastic.policy import Proposal
from horovod.runner.output.console import Console
from horovod.runner.output.report import LaunchError
from horovod.runner.output.watcher import Status


def moment(state: JobState | None = None, **facts: Any) -> JobState:
    """A job at one moment, or another one that differs in these facts.

    `workers` are all that live; those who have joined have a place in the newest decision.
    """
    if "workers" in facts:
        workers = facts.pop("workers")
        facts["alive"] = {worker.number: worker for worker in workers}
        facts["placed_workers"] = frozenset(w.number for w in workers if w.joined is not None)
    return dataclasses.replace(state or JobState(hosts_known=True), **facts)


class Hosts(HostSet):
    """Hosts that start nothing, and remember whom they were told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[tuple[str, int]] = []
        self.disobedient: set[str] = set()

    def want(self, names: Sequence[str]) -> dict[str, LaunchError]:
        return {}

    def let_go(self, name: str) -> None: ...

    def names(self) -> list[str]:
        return []

    def is_ready(self, name: str) -> bool:
        return True

    def is_connecting(self, name: str) -> bool:
        return False

    def met(self, host: Any) -> None: ...

    def start(self, name: str, worker: int, index: int, slots: int, place: Slot | None) -> None: ...

    def stop(self, name: str, worker: int, grace: float) -> None:
        self.stopped.append((name, worker))

    def obeys(self, name: str) -> bool:
        return name not in self.disobedient


class Parts:
    """A job of the given hosts and slots. Timers run when a test says so."""

    def __init__(
        self,
        console: Console,
        events: Path,
        slots: Mapping[str, int],
        limits: Limits,
        max_failures: int,
    ) -> None:
        self.limits = limits
        self.state = JobState()
        self.hosts = Hosts()
        self.manager = HostManager(FixedHosts(slots), max_failures=max_failures)
        self.manager.update_available_hosts()
        self.log = DecisionLog(self.state, MemoryStore())
        self.status = Status(console, str(events))
        self.failures = Failures(self.state, self.hosts, self.manager, self.status)
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.reconciled = 0
        self.liveness = Liveness(
            limits,
            self.state,
            self.failures,
            lambda seconds, do: self.timers.append((seconds, do)),
            self._reconcile,
        )
        self._events = events

    def _reconcile(self) -> None:
        self.reconciled += 1

    def start(self, *hosts: str) -> list[Process]:
        """Workers that have a process on these hosts."""
        processes = [self.state.add_process(host) for host in hosts]
        for process in processes:
            process.pid = 1 << 30  # no process can have that number
        return processes

    def decide(self, *workers: int, kind: str = "start", min_np: int = 1) -> Decision:
        """A decision with places for these workers."""
        members = tuple(
            dataclasses.replace(self.state.alive[w], joined=1, seat=seat)
            for seat, w in enumerate(workers)
        )
        decision = self.log.announce(Proposal(members, kind, min_np=min_np))
        ranks = {w: decision.slots[f"w{w}"].rank for w in workers}
        self.state.assign_ranks(members, ranks)
        return decision

    def run_timer(self, seconds: float) -> None:
        """Let that much time pass, as far as timers are concerned."""
        due = [do for after, do in self.timers if after == seconds]
        self.timers = [timer for timer in self.timers if timer[0] != seconds]
        assert due, f"nobody waits {seconds} s"
        for do in due:
            do()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._events.read_text().splitlines()]


@contextmanager
def parts(
    directory: Path, slots: Mapping[str, int], limits: Limits, max_failures: int = 1
) -> Iterator[Parts]:
    fd = os.open(directory / "console", os.O_WRONLY | os.O_CREAT)
    try:
        made = Parts(Console(fd, fd), directory / "events", slots, limits, max_failures)
        with made.status:
            yield made
    finally:
        os.close(fd)
