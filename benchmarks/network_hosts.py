"""Hosts for benchmarks/network.py: name spaces of this machine, or only names.

`network` gives the best there is: with root, `ip` and `tc` each host has a network stack of its
own (`tests.hosts`) and a link whose rate can be limited. Otherwise all ranks talk over loopback,
and only HOROVOD_HOSTNAME tells hosts apart: the same programs, but no network that could be slow.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from benchmarks.delayed_switch import DelayedSwitch
from benchmarks.processes import Commands, free_port, torchrun_environment
from horovod.common.topology import Slot
from tests.hosts import INTERFACE, USER_PORT, Hosts, available, host_address, host_of, plan

UNLIMITED = "unlimited"


class Network(ABC):
    """So many hosts, and what joins them."""

    note: str  # for people

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts

    @abstractmethod
    def limit(self, link: str) -> None:
        """Let every host send no faster than that, e.g. 1gbit, or 100mbit/20ms with a latency."""

    @abstractmethod
    def _master(self) -> tuple[str, int]:
        """An address that all ranks reach, and a free port there for one job."""

    @abstractmethod
    def _variables(self, slot: Slot) -> dict[str, str]: ...

    def _inside(self, slot: Slot, program: list[str]) -> list[str]:
        """The command that runs the program on the slot's host."""
        return program

    def commands(self, program: list[str], more: Mapping[str, str], per_host: int) -> Commands:
        """One for each rank of a job, as torchrun on every host would start it."""
        master = self._master()
        found: Commands = []
        for slot in plan([per_host] * self.hosts):
            environ = torchrun_environment(
                slot.rank,
                slot.size,
                (slot.local_rank, slot.local_size),
                master,
                GROUP_RANK=str(host_of(slot)),
                GROUP_WORLD_SIZE=str(self.hosts),
                HOROVOD_HOSTNAME=slot.hostname,
                **self._variables(slot),
            )
            found.append((self._inside(slot, program), {**environ, **more}))
        return found


class NameSpaces(Network):
    """Every host a network stack of its own, joined by a bridge."""

    note = "hosts are network name spaces of this machine, joined by a bridge"

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(hosts.count)
        self._hosts = hosts
        self._ports = itertools.count(USER_PORT)  # nobody else is there
        self._switch: DelayedSwitch | None = None

    def limit(self, link: str) -> None:
        rate, _, latency = link.partition("/")
        for host in range(self.hosts):
            self._hosts.limit(host, None if rate == UNLIMITED else rate)
        if latency and self._switch is None:
            self._switch = DelayedSwitch([self._hosts.unplug(host) for host in range(self.hosts)])
        if self._switch is not None:
            self._switch.delay = float(latency.removesuffix("ms") or 0) / 1000

    def close(self) -> None:
        if self._switch is not None:
            self._switch.close()

    def _master(self) -> tuple[str, int]:
        return host_address(0), next(self._ports)

    def _variables(self, slot: Slot) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": INTERFACE}

    def _inside(self, slot: Slot, program: list[str]) -> list[str]:
        entrance = json.dumps(self._hosts.entrance(host_of(slot)))
        return [sys.executable, "-m", "benchmarks.network_entry", entrance, *program]


class Loopback(Network):
    """Names only."""

    def __init__(self, hosts: int, why: str) -> None:
        super().__init__(hosts)
        self.note = f"hosts are only names, and links the loopback of this machine: {why}"

    def limit(self, link: str) -> None:
        if link != UNLIMITED:
            raise ValueError(f"loopback has no rate of {link}")

    def _master(self) -> tuple[str, int]:
        return "127.0.0.1", free_port()

    def _variables(self, slot: Slot) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"}


def missing() -> str | None:
    """Why there can be no links of a given rate here; None if there can."""
    reason = available()
    if reason is None:
        with Hosts(1) as hosts:
            try:
                hosts.limit(0, "1gbit")
            except Exception as error:
                return f"tc cannot limit links here: {error}"
    return reason


@contextmanager
def network(hosts: int, without: str | None) -> Iterator[Network]:
    """That many hosts; over loopback if name spaces are `without`, for that reason."""
    if without is not None:
        yield Loopback(hosts, without)
        return
    with Hosts(hosts) as made, closing(NameSpaces(made)) as spaces:
        yield spaces


def cores() -> int:
    return len(os.sched_getaffinity(0))
