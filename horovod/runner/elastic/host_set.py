"""The hosts of an elastic job as the driver sees them, whoever starts processes there.

`driver` says which hosts it wants, and starts and stops workers on those that are ready. `agents`
is the implementation for horovodrun, with a process of ours on every host; a cluster that starts
processes itself has its own. What happens on a host is reported to the driver's methods `ready`,
`started`, `could_not_start` and `exited`.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from horovod.common.decisions import Assignment

_REST_SECONDS = 5.0


class Host(Protocol):
    """A host that reports something."""

    @property
    def name(self) -> str: ...


class HostSet(ABC):
    """All hosts that are wanted. A host that cannot be used rests before it is tried again."""

    def __init__(self) -> None:
        self._rests: dict[str, float] = {}  # until when a host is left alone

    def first(self, slots: Mapping[str, int], most: int | None) -> list[str]:
        """As many of these hosts as `most` workers need; resting hosts add no capacity."""
        found, room = [], 0
        for name, count in slots.items():
            if most is not None and room >= most:
                break
            found.append(name)
            room += 0 if self._rests_now(name) else count
        return found

    def rest(self, name: str) -> None:
        """Leave a host alone for a while."""
        self._rests[name] = time.monotonic() + _REST_SECONDS

    def _rests_now(self, name: str) -> bool:
        return time.monotonic() < self._rests.get(name, 0.0)

    @abstractmethod
    def want(self, names: Sequence[str]) -> dict[str, str]:
        """Prepare these hosts; those that cannot even be tried, with the reason."""

    @abstractmethod
    def let_go(self, name: str) -> None:
        """This host is not needed any more, and has no workers."""

    @abstractmethod
    def names(self) -> list[str]:
        """The hosts that are wanted."""

    @abstractmethod
    def is_ready(self, name: str) -> bool:
        """Whether workers can be started there."""

    @abstractmethod
    def is_connecting(self, name: str) -> bool:
        """Whether it is wanted, and not ready yet."""

    @abstractmethod
    def met(self, host: Any) -> str:
        """The host has answered: find the way from there to the store. A problem, or nothing."""

    def probed(self, host: Any, answer: Mapping[str, Any]) -> str:
        """The answer to a question that `met` asked. A problem, or nothing."""
        return ""

    def lost(self, host: Any) -> bool:
        """The host is gone by itself; whether it was one that we want."""
        return False

    @abstractmethod
    def start(
        self, name: str, worker: int, index: int, slots: int, place: Assignment | None
    ) -> None:
        """Start a worker, in a certain one of the host's slots.

        `place` is the one that it will have in the job if nothing unexpected happens: programs
        look for it in their environment before they call `init`, which tells the real one.
        """

    def obstacle(self) -> str:
        """Say why workers that were to start have not for a while; nothing if none is known."""
        return ""

    @abstractmethod
    def stop(self, name: str, worker: int, grace: float) -> None:
        """End a worker, by force after `grace` seconds. Nothing if its host is lost."""

    @abstractmethod
    def obeys(self, name: str) -> bool:
        """Whether a worker that was stopped there is certainly gone."""


def place_variables(place: Assignment | None) -> dict[str, str]:
    """The environment in which a worker finds the place that it will probably have."""
    if place is None:
        return {}
    facts = dataclasses.asdict(place.topology)
    return {f"HOROVOD_{fact.upper()}": str(value) for fact, value in facts.items()}
