"""The hosts of an elastic job that come by themselves, as ``horovodrun --join`` brings them.

`run_job` makes one for the elastic job, which asks it for hosts and lets it connect to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.joining import JoinServer
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.slots.hosts import Host, is_local


class JoinedHosts(HostDiscovery):
    """Those that are connected, and this machine if it is among the hosts of the job."""

    def __init__(self, server: JoinServer, hosts: Sequence[Host]) -> None:
        self._server = server
        self._own = {host.name: host.slots or 1 for host in hosts if is_local(host.name)}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        joined = {name: link.slots for name, link in self._server.waiting().items()}
        return {**self._own, **joined}

    def connect(self, name: str, goes_on: Callable[[], bool]) -> HostAgent:
        """The agent of a host; one that is let go while the job ``goes_on`` may join again.

        Raises `ConnectionResetError` where the host has gone.
        """
        if name in self._own:
            return HostAgent(name)
        link = self._server.waiting().get(name)
        if link is None:
            raise ConnectionResetError("horovodrun --join has ended there")
        link.restarts = goes_on
        return link.start_agent(name)
