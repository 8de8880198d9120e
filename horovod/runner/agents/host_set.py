"""The interface between a job and the hosts on which its workers run.

A policy (`controller.JobPolicy`) says which hosts it wants, and starts and stops workers on those
that are ready. `agent_set` is the implementation with an agent on every host; a cluster that starts
processes itself, such as Ray, has its own. An implementation reports events to the methods `ready`,
`started`, `could_not_start`, `exited` and `lost` of the `controller.JobController`.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from horovod.common.topology import Slot
from horovod.runner.output.report import LaunchError

_REST_SECONDS = 5.0


class Host(Protocol):
    """A host that reports an event."""

    @property
    def name(self) -> str: ...


class HostSet(ABC):
    """All hosts that are wanted. A host that cannot be used rests before it is tried again."""

    def __init__(self) -> None:
        self._rests: dict[str, float] = {}  # by host: when it may be tried again

    def first(self, slots: Mapping[str, int], most: int | None) -> list[str]:
        """Return as many of these hosts as `most` workers need; resting hosts add no capacity."""
        chosen, room = [], 0
        for name, count in slots.items():
            if most is not None and room >= most:
                break
            chosen.append(name)
            room += 0 if self._rests_now(name) else count
        return chosen

    def rest(self, name: str) -> None:
        """Try nothing on a host for a while."""
        self._rests[name] = time.monotonic() + _REST_SECONDS

    def _rests_now(self, name: str) -> bool:
        return time.monotonic() < self._rests.get(name, 0.0)

    @abstractmethod
    def want(self, names: Sequence[str]) -> dict[str, LaunchError]:
        """Prepare these hosts; return those that cannot even be tried, with the reasons."""

    @abstractmethod
    def let_go(self, name: str) -> None:
        """Release a host that is not needed any more and has no workers."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the hosts that are wanted."""

    @abstractmethod
    def is_ready(self, name: str) -> bool:
        """Return whether workers can be started on a host."""

    @abstractmethod
    def is_connecting(self, name: str) -> bool:
        """Return whether a host is wanted but not ready yet."""

    @abstractmethod
    def met(self, host: Any) -> LaunchError | None:
        """Find out how a host that has answered reaches the store; return a problem, or None."""

    def probed(self, host: Any, answer: Mapping[str, Any]) -> LaunchError | None:
        """Take the answer to a question that `met` asked; return a problem, or None."""
        return None

    def lost(self, host: Any) -> bool:
        """Remove a host that is gone by itself; return whether it was wanted."""
        return False

    @abstractmethod
    def start(self, name: str, worker: int, index: int, slots: int, slot: Slot | None) -> None:
        """Start a worker.

        Args:
            name: The host.
            worker: The worker's number.
            index: The slot of the host that the worker occupies.
            slots: The number of slots of the host.
            slot: The ranks that the worker will have if nothing unexpected happens. Programs
                look for them in their environment before they call `init`, which returns the real
                ones.
        """

    def obstacle(self) -> str:
        """Return why workers that should start have not done so for a while; empty if unknown."""
        return ""

    @abstractmethod
    def stop(self, name: str, worker: int, grace: float) -> None:
        """End a worker, by force after `grace` seconds; do nothing if its host is lost."""

    @abstractmethod
    def obeys(self, name: str) -> bool:
        """Return whether a worker that was stopped on this host is certainly gone."""


def assignment_variables(slot: Slot | None) -> dict[str, str]:
    """Return the environment in which a worker finds the ranks that it will probably have."""
    if slot is None:
        return {}
    facts = dataclasses.asdict(slot.topology)
    return {f"HOROVOD_{fact.upper()}": str(value) for fact, value in facts.items()}
