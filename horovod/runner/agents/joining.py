"""Hosts that come by themselves: ``horovodrun --listen`` waits for ``horovodrun --join`` on them.

`run_job` opens a `JoinServer`. A job with fixed ranks calls `gather` and starts when all its hosts
are there; an elastic job takes them as they come (`horovod.runner.elastic.joined_hosts`). A host
proves that it knows the job's secret before anything that it says is read.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.runner.agents.channel import LinkChannel
from horovod.runner.agents.channel_link import ChannelLink
from horovod.runner.agents.link_server import LinkServer
from horovod.runner.agents.srun import NODES_OWN
from horovod.runner.agents.starter import check_name
from horovod.runner.slots.hosts import Host, is_local
from horovod.runner.slots.worker_env import HOSTS_OWN

_GLANCE = 1.0  # seconds between looks at whether hosts that have joined are still there
_MOST_SLOTS = 100_000


class JoinedLink(ChannelLink):
    """The line to a host that has joined."""

    keeps = (*HOSTS_OWN, *NODES_OWN)

    def __init__(self, channel: LinkChannel, name: str, slots: int) -> None:
        super().__init__(channel)
        self.name = name
        self.slots = slots

    @property
    def is_waiting(self) -> bool:
        """Whether an agent can be started there, or runs."""
        return self._code is None and self.is_alive

    def describe_end(self, code: int) -> str:
        if self._code is None:
            return "horovodrun --join ended there, or its connection did"
        return super().describe_end(code)


class JoinServer(LinkServer[JoinedLink]):
    """Where hosts join a job."""

    owner = "horovodrun"

    def __init__(self, address: str, port: int, key: bytes, expected: Sequence[Host]) -> None:
        """``expected`` are the hosts of the job; any may come where all of them are this machine.

        Raises `OSError` where nobody can listen at that address and port.
        """
        self._expected = {host.name: host.slots for host in others(expected)}
        super().__init__(address, key, port)
        name = socket.gethostname() if address in ("0.0.0.0", "::") else address
        self.address = f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}"

    def make_link(self, channel: LinkChannel, hello: Mapping[str, Any]) -> JoinedLink:
        name, slots = str(hello["host"]), int(hello["slots"])
        check_name(name)
        if not 0 < slots <= _MOST_SLOTS:
            raise ValueError(f"{name} offers {slots} slots")
        why = self._refusal(name)
        if why:
            channel.send({"end": "refused", "why": why})
            raise ValueError(why)
        return JoinedLink(channel, name, self._expected.get(name) or slots)

    def _refusal(self, name: str) -> str:
        if self._expected and name not in self._expected:
            hosts = ", ".join(self._expected)
            return f"{name} is not among the hosts of this job, which are {hosts}"
        if name in self.waiting():
            return f"there is a host {name} in this job already; say another name with -H"
        return ""

    def waiting(self) -> dict[str, JoinedLink]:
        """The hosts that are here, by name, in the order in which they came."""
        return {link.name: link for link in self.links() if link.is_waiting}


def gather(
    server: JoinServer, hosts: Sequence[Host], num_proc: int, timeout: float
) -> dict[str, JoinedLink]:
    """The hosts of a job with fixed ranks, by name, once all of them have joined.

    Those are ``hosts`` but for this machine, or, where no others are named, as many as are needed
    for ``num_proc`` slots. Raises `TimeoutError` that says who is missing.
    """
    deadline = time.monotonic() + timeout
    named = others(hosts)
    needed = num_proc - sum(host.slots or 0 for host in hosts if is_local(host.name))
    while True:
        here = server.waiting()
        if named:
            missing = [host.name for host in named if host.name not in here]
            if not missing:
                return {host.name: here[host.name] for host in named}
            problem = f"{', '.join(missing)} did not join"
        else:
            chosen, slots = {}, 0
            for name, link in here.items():
                if slots < needed:
                    chosen[name], slots = link, slots + link.slots
            if slots >= needed:
                return chosen
            came = ", ".join(f"{name}:{link.slots}" for name, link in here.items()) or "nobody"
            problem = f"the job needs {needed} slots of other hosts, and {came} joined"
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{problem} within {timeout:g} s (--start-timeout): run horovodrun --join "
                f"{server.address} there, with the same secret"
            )
        server.wait(min(left, _GLANCE))


def others(hosts: Sequence[Host]) -> list[Host]:
    """The hosts that are not this machine."""
    return [host for host in hosts if not is_local(host.name)]
