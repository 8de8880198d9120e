"""Which hosts there are for an elastic job, and how many workers each takes.

`HostDiscovery` is what a cluster implements: a script (`HostDiscoveryScript`), a fixed list
(`FixedHosts`), or a scheduler's own. `HostManager` keeps the newest answer, in a stable order, and
the blacklist. The driver lets `polling` ask, in a thread of its own, and hands the answers to its
manager.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from horovod.runner.elastic.blacklist import Blacklist
from horovod.runner.options.discovery_command import split_command, start
from horovod.runner.slots.hosts import parse_hosts

SCRIPT_SECONDS = 60.0
"""After which a discovery script that has not ended is killed."""


GIVEN_BACK_SECONDS = 60.0
"""For which a slot that a worker was told to leave is not used again."""


class NoMoreHosts(Exception):
    """What gave hosts is gone, and with it those that it gave; the message says why."""


class HostDiscovery(ABC):
    """Says which hosts are available."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The hosts available now and how many workers each takes. May take its time; any
        exception counts as a failed attempt, and `NoMoreHosts` ends the job."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give up an attempt that is under way in another thread."""


class FixedHosts(HostDiscovery):
    """A list that only its owner changes."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """From now on these."""
        self._host_slots = dict(host_slots)


class HostDiscoveryScript(HostDiscovery):
    """A command that prints one host a line, ``HOST`` or ``HOST:SLOTS``.

    It is a program or a script, which may be followed by arguments (see `discovery_command`).
    `slots` is for lines without a number.
    """

    def __init__(
        self, discovery_script: str, slots: int | None, timeout: float = SCRIPT_SECONDS
    ) -> None:
        self._script = discovery_script
        self._command = split_command(discovery_script)
        self._slots = slots
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        with start(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # it can be ended with all that it starts
        ) as process:
            self._process = process
            try:
                output, errors = process.communicate(timeout=self._timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"the discovery script {self._script} did not end within {self._timeout:g} s"
                ) from None
            finally:
                self._process = None
                _kill_group(process)
        if process.returncode != 0:
            said = errors.decode(errors="replace").strip()
            raise RuntimeError(
                f"the discovery script {self._script} ended with exit code {process.returncode}"
                + (f": {said}" if said else " and wrote nothing to stderr")
            )
        return self._parse(output.decode(errors="replace"))

    def close(self) -> None:
        process = self._process
        if process is not None:
            _kill_group(process)

    def _parse(self, output: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in output.splitlines():
            if not line.strip():
                continue
            try:
                for host in parse_hosts(line.strip()):
                    slots = host.slots if host.slots is not None else self._slots
                    if slots is None:
                        raise ValueError(
                            "it has no number of slots: print HOST:SLOTS, or give --slots-per-host"
                        )
                    found[host.name] = slots
            except ValueError as error:
                raise ValueError(
                    f"the discovery script {self._script} printed {line.strip()!r}: {error}"
                ) from None
        return found


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class HostUpdateResult:
    """What changed between two answers; flags that may be combined."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


@dataclass(frozen=True)
class DiscoveredHosts:
    """The hosts as they are known at one moment, oldest first; never changes."""

    host_slots: Mapping[str, int] = field(default_factory=dict)
    host_assignment_order: tuple[str, ...] = ()  # of all hosts in `host_slots`
    blacklisted: frozenset[str] = frozenset()

    @property
    def available_hosts(self) -> frozenset[str]:
        return frozenset(self.host_slots) - self.blacklisted

    def get_slots(self, host: str) -> int:
        return self.host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        return sum(self.host_slots[host] for host in self.available_hosts)


class HostManager:
    """The newest known hosts and their record. Not for several threads."""

    def __init__(
        self,
        discovery: HostDiscovery,
        cooldown_range: tuple[float, float] | None = None,
        max_failures: int = 1,
    ) -> None:
        self.discovery = discovery
        self.blacklisting = Blacklist(max_failures, cooldown_range)
        self._slots: dict[str, int] = {}  # as discovered
        self._given_back: dict[str, list[float]] = {}  # for each slot, until when
        self._events: dict[str, threading.Event] = {}
        self._excluded: frozenset[str] = frozenset()

    @property
    def current_hosts(self) -> DiscoveredHosts:
        now = time.monotonic()
        slots = {
            host: max(0, count - sum(until > now for until in self._given_back.get(host, ())))
            for host, count in self._slots.items()
        }
        return DiscoveredHosts(slots, tuple(slots), self._blacklisted())

    def update_available_hosts(self) -> int:
        """Ask for the hosts and take the answer; what changed, as in `HostUpdateResult`."""
        return self.take(self.discovery.find_available_hosts_and_slots())

    def take(self, found: Mapping[str, int]) -> int:
        """These are the hosts now. Those known before keep their order; new ones come last."""
        changed = HostUpdateResult.no_update
        excluded = self._blacklisted()
        for host, slots in self._slots.items():
            if found.get(host, 0) < slots:
                changed |= HostUpdateResult.removed
        for host, slots in found.items():
            back = host in self._excluded and host not in excluded
            if slots > self._slots.get(host, 0) or back:
                changed |= HostUpdateResult.added
        for host in {*self._slots, *found}:
            if found.get(host) != self._slots.get(host):
                self._given_back.pop(host, None)
        self._excluded = excluded
        known = {host: found[host] for host in self._slots if host in found}
        self._slots = {**known, **{host: n for host, n in found.items() if host not in known}}
        return changed

    def give_back(self, host: str) -> None:
        """A worker was told to leave its slot: do not use it again at once.

        Whoever told it to will probably take the host away. If it is still there after a while,
        or is offered differently, its slots count again.
        """
        self._given_back.setdefault(host, []).append(time.monotonic() + GIVEN_BACK_SECONDS)

    def blacklist(self, host: str) -> None:
        """Do not use this host, for now or for good."""
        self.blacklisting.add(host, time.monotonic())
        self._excluded = self._blacklisted()
        self.get_host_event(host).set()

    def get_host_event(self, host: str) -> threading.Event:
        """Set when the host gets blacklisted; for programs that run something there."""
        return self._events.setdefault(host, threading.Event())

    @staticmethod
    def order_available_hosts(
        available_hosts: Collection[str], prev_host_assignment_order: Sequence[str]
    ) -> list[str]:
        """Hosts known before in their order, then the others."""
        known = [host for host in prev_host_assignment_order if host in available_hosts]
        return [*known, *(host for host in available_hosts if host not in known)]

    def is_blacklisted(self, host: str) -> bool:
        return self.blacklisting.is_blacklisted(host, time.monotonic())

    def record_failure(self, host: str) -> bool:
        """A worker failed there; whether the host is blacklisted because of it."""
        added = self.blacklisting.record_failure(host, time.monotonic())
        self._excluded = self._blacklisted()
        if added:
            self.get_host_event(host).set()
        return added

    def _blacklisted(self) -> frozenset[str]:
        now = time.monotonic()
        return frozenset(h for h in self._slots if self.blacklisting.is_blacklisted(h, now))
