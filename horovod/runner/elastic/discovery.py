"""Find out which hosts there are for an elastic job, and how many workers each takes.

A cluster implements `HostDiscovery`: there is one for a script (`HostDiscoveryScript`) and one for
a fixed list (`FixedHosts`), and schedulers may have their own. A `HostPoller` asks it repeatedly in
a thread, so that the driver's loop never waits. `HostManager` keeps the newest answer, in a stable
order, and the `Blacklist` of hosts that have failed too often.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from horovod.runner.options.values import split_command, start_program
from horovod.runner.slots.hosts import parse_hosts


class Blacklist:
    """Records the failures of all hosts, and says which hosts are not used because of them.

    A host may lose workers before it is blacklisted. Without a cooldown range that is for good.
    With one the host may come back, with a clean record, after a time that doubles with every
    blacklisting, from the lower to the upper end of the range.
    """

    def __init__(
        self,
        max_failures: int = 1,
        cooldown_range: tuple[float, float] | None = None,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """Begin with a clean record.

        Args:
            max_failures: The failures after which a host is blacklisted; 1 is Horovod's own rule.
            cooldown_range: The shortest and the longest time in seconds; None: for good.
            dice: Returns random numbers from 0 to 1.
        """
        self._max_failures = max_failures
        self._range = cooldown_range
        self._dice = dice
        self._failures: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def record_failure(self, host: str, now: float) -> bool:
        """Count a failure against a host; return whether the host is blacklisted because of it.

        Failures of a host that is already blacklisted do not prolong that.
        """
        if self.is_blacklisted(host, now):
            return False
        self._failures[host] = self._failures.get(host, 0) + 1
        if self._failures[host] < self._max_failures:
            return False
        self.add(host, now)
        return True

    def add(self, host: str, now: float) -> None:
        """Blacklist a host, whatever its record is."""
        if not self.is_blacklisted(host, now):
            self._times[host] = self._times.get(host, 0) + 1
            self._until[host] = now + self._delay(self._times[host])

    def is_blacklisted(self, host: str, now: float) -> bool:
        until = self._until.get(host)
        if until is None:
            return False
        if now < until:
            return True
        del self._until[host]
        self._failures.pop(host, None)
        return False

    def is_for_good(self, host: str) -> bool:
        return math.isinf(self._until.get(host, 0.0))

    def failures(self, host: str) -> int:
        """Return how many failures count against a host now."""
        return self._failures.get(host, 0)

    def _delay(self, times: int) -> float:
        if self._range is None:
            return math.inf
        lower, upper = self._range
        # A random part, so that hosts that failed together do not come back together.
        return min(upper, lower * 2.0 ** min(times - 1, 60) + self._dice() * lower)


SCRIPT_SECONDS = 60.0
"""Seconds after which a discovery script that has not ended is killed."""

GIVEN_BACK_SECONDS = 60.0
"""Seconds for which a slot that a worker was told to leave is not used again."""


class NoMoreHosts(Exception):
    """The source of hosts is gone, and with it all its hosts; the message says why."""


class HostDiscovery(ABC):
    """A source of hosts for elastic jobs; clusters derive from it."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts that are available now, and how many workers each takes.

        The call may take long: it runs in a thread of its own.

        Raises:
            NoMoreHosts: If no more hosts will come; this ends the job.
            Exception: Any other error counts as a failed attempt.
        """

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give up an attempt that is under way in another thread."""


class FixedHosts(HostDiscovery):
    """A fixed list of hosts, which only its owner changes."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Replace the hosts."""
        self._host_slots = dict(host_slots)


class HostDiscoveryScript(HostDiscovery):
    """A command that prints one host per line, ``HOST`` or ``HOST:SLOTS``.

    ``HOST:0`` is a host that takes no worker now, as if it were not printed.
    """

    def __init__(
        self, discovery_script: str, slots: int | None, timeout: float = SCRIPT_SECONDS
    ) -> None:
        """Prepare to run the command.

        Args:
            discovery_script: A program or a script, which may be followed by arguments.
            slots: The number of slots for lines that have none.
            timeout: Seconds after which the command is killed.
        """
        self._script = discovery_script
        self._command = split_command(discovery_script)
        self._slots = slots
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        with start_program(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that it can be killed with all that it has started
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
                _kill_group(process)  # also what a script that has ended left running
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
                for host in parse_hosts(line.strip(), may_be_none=True):
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
    """Flags that say what changed between two answers; they may be combined."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


@dataclass(frozen=True)
class DiscoveredHosts:
    """The hosts that are known at one moment, oldest first. It never changes."""

    host_slots: Mapping[str, int] = field(default_factory=dict)
    host_assignment_order: tuple[str, ...] = ()  # all hosts of `host_slots`
    blacklisted: frozenset[str] = frozenset()

    @property
    def available_hosts(self) -> frozenset[str]:
        return frozenset(self.host_slots) - self.blacklisted

    def get_slots(self, host: str) -> int:
        return self.host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        return sum(self.host_slots[host] for host in self.available_hosts)


class HostManager:
    """The newest known hosts and their record of failures. Only one thread may use it."""

    def __init__(
        self,
        discovery: HostDiscovery,
        cooldown_range: tuple[float, float] | None = None,
        max_failures: int = 1,
    ) -> None:
        self.discovery = discovery
        self.blacklisting = Blacklist(max_failures, cooldown_range)
        self._slots: dict[str, int] = {}  # slots by host, as discovered
        self._given_back: dict[str, list[float]] = {}  # by host: when each such slot counts again
        self._events: dict[str, threading.Event] = {}
        self._excluded: frozenset[str] = frozenset()

    @property
    def current_hosts(self) -> DiscoveredHosts:
        now = time.monotonic()
        slots = dict(self._slots)
        for host in self._given_back.keys() & slots:
            num_unused = sum(until > now for until in self._given_back[host])
            slots[host] = max(0, slots[host] - num_unused)
        return DiscoveredHosts(slots, tuple(slots), self._blacklisted())

    def update_available_hosts(self) -> int:
        """Ask for the hosts and take the answer; return flags of `HostUpdateResult`."""
        return self.take(self.discovery.find_available_hosts_and_slots())

    def take(self, found: Mapping[str, int]) -> int:
        """Replace the hosts; those known before keep their order, and new ones come last.

        Returns:
            What changed, as flags of `HostUpdateResult`.
        """
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
        """Leave a slot unused for a while, because a worker was told to leave it.

        The scheduler that told it so will probably take the host away. If the host is still there
        after a while, or is offered with another number of slots, all its slots count again.
        """
        self._given_back.setdefault(host, []).append(time.monotonic() + GIVEN_BACK_SECONDS)

    def blacklist(self, host: str) -> None:
        """Blacklist a host: for a time if there is a cooldown range, otherwise for good."""
        self.blacklisting.add(host, time.monotonic())
        self._exclude(host)

    def _exclude(self, host: str) -> None:
        self._excluded |= {host}
        self.get_host_event(host).set()

    def get_host_event(self, host: str) -> threading.Event:
        """Return the event that is set when the host gets blacklisted."""
        return self._events.setdefault(host, threading.Event())

    @staticmethod
    def order_available_hosts(
        available_hosts: Collection[str], prev_host_assignment_order: Sequence[str]
    ) -> list[str]:
        """Return the hosts known before, in their order, then the others."""
        known = [host for host in prev_host_assignment_order if host in available_hosts]
        return [*known, *(host for host in available_hosts if host not in known)]

    def is_blacklisted(self, host: str) -> bool:
        return self.blacklisting.is_blacklisted(host, time.monotonic())

    def record_failure(self, host: str) -> bool:
        """Count a failure against a host; return whether the host is blacklisted because of it."""
        added = self.blacklisting.record_failure(host, time.monotonic())
        if added:
            self._exclude(host)
        return added

    def _blacklisted(self) -> frozenset[str]:
        return frozenset(filter(self.is_blacklisted, self._slots))


_CLOSE_SECONDS = 5.0


class HostPoller:
    """Asks for hosts repeatedly, in a thread of its own."""

    def __init__(
        self,
        discovery: HostDiscovery,
        report: Callable[[dict[str, int] | Exception], None],
        pause: float,
    ) -> None:
        """Begin to ask.

        Args:
            discovery: The source of hosts.
            report: Gets every answer or exception, in the poller's thread.
            pause: Seconds after each answer until the next question.
        """
        self._discovery = discovery
        self._report = report
        self._pause = pause
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="horovod-discovery", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._closing.is_set():
            answer: dict[str, int] | Exception
            try:
                answer = self._discovery.find_available_hosts_and_slots()
            except Exception as error:  # a cluster's own discovery may raise anything
                answer = error
            if self._closing.is_set():
                return
            self._report(answer)
            self._closing.wait(self._pause)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ask no more, and end a script that is running."""
        self._closing.set()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.running and time.monotonic() < deadline:
            self._discovery.close()  # repeatedly, because an attempt may just have begun
            self._thread.join(0.1)
