"""The job's store, in which the ranks find each other, and the addresses that serve it.

A job opens a `StoreEndpoints`. When all workers are on this machine it listens on loopback alone.
Otherwise the agents have said how they were reached; `addresses_towards` turns that into
addresses of this machine, each host tries them (`probe`), and endpoints that no host needs are
closed.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from horovod.common.addresses import LOOPBACK, is_local, is_loopback, resolve
from horovod.common.store import MemoryStore, StoreServer
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.probe import interface_address, reserve_port, source_towards

Endpoint = tuple[str, int]  # an address and a port that serve the store


class StoreEndpoints:
    """The job's store and its servers."""

    def __init__(self, key: bytes, store: MemoryStore | None = None) -> None:
        self.key = key
        self.store = MemoryStore() if store is None else store
        self._servers: dict[str, StoreServer] = {}
        self._reserved: list[socket.socket] = []

    @property
    def endpoints(self) -> list[Endpoint]:
        return [(server.address, server.port) for server in self._servers.values()]

    def open(self, address: str) -> Endpoint:
        """Serve the store at this address of this machine, unless it already is."""
        if address not in self._servers:
            self._servers[address] = StoreServer(address, self.key, store=self.store)
        return address, self._servers[address].port

    def open_towards(self, agents: Sequence[HostAgent], nics: Sequence[str]) -> str:
        """Serve the store at addresses at which these hosts may reach it.

        Args:
            agents: The agents of the hosts.
            nics: The network interfaces to use; any if empty.

        Returns:
            A description of the problem; empty if there is none.
        """
        for agent in agents:
            for address in addresses_towards(agent.name, connection_ends(agent), nics):
                self.open(address)
        if self.endpoints:
            return ""
        names = ", ".join(agent.name for agent in agents)
        return (
            f"cannot tell which address of this machine leads to {names}; say which network "
            f"interface does with --network-interfaces"
        )

    def keep(self, endpoints: Collection[Endpoint]) -> None:
        """Close the other endpoints."""
        for address, port in self.endpoints:
            if (address, port) not in endpoints:
                self._servers.pop(address).close()

    def probe_all(self, agents: Sequence[HostAgent], nics: Sequence[str], timeout: float) -> str:
        """Let the agents of all hosts of a job find out how they reach the store.

        Returns:
            A description of the problem; empty if there is none. The answers come as events.
        """
        remote = [agent for agent in agents if agent.remote]
        if not remote:
            self.open(LOOPBACK)
        problem = self.open_towards(remote, nics)
        if problem:
            return problem
        theirs = {agent.name: connection_ends(agent)[1] for agent in agents}
        here = self.endpoints[0][0]
        for agent in agents:
            others = [end or here for name, end in theirs.items() if name != agent.name]
            self.probe(agent, nics, others, timeout)
        return ""

    def probe(
        self, agent: HostAgent, nics: Sequence[str], towards: Sequence[str], timeout: float
    ) -> None:
        """Let an agent find an endpoint that it reaches, and its own address for other hosts."""
        agent.probe(
            {
                "endpoints": self.endpoints,
                "key": self.key.hex(),
                "timeout": timeout,
                "nics": list(nics),
                "towards": list(towards),
            }
        )

    def reserve_port(self, address: str) -> int:
        """Reserve a port of this machine for the job until `close`, and return it."""
        self._reserved.append(reserve_port(address))
        return int(self._reserved[-1].getsockname()[1])

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        for reserved in self._reserved:
            reserved.close()


def addresses_towards(name: str, ends: tuple[str, str], nics: Sequence[str]) -> list[str]:
    """Return addresses of this machine at which another host may reach it, best first.

    Args:
        name: The name of that host.
        ends: Both addresses of the connection to that host, from `connection_ends`.
        nics: The network interfaces to use; any if empty.
    """
    if nics:
        return [address for nic in nics if (address := interface_address(nic))]
    seen, theirs = ends
    if seen and is_local(seen):
        return [seen]
    # Behind a jump host or a translating router, the address that the host sees is not one of ours.
    sources = map(source_towards, [theirs] if theirs else resolve(name))
    found = list(dict.fromkeys(each for each in sources if each and not is_loopback(each)))
    return found or ([] if theirs else own_addresses())


def connection_ends(agent: HostAgent) -> tuple[str, str]:
    """Return both addresses of the connection to an agent, ours first; empty if unknown."""
    if any(agent.link.ends) or not agent.remote:
        return agent.link.ends
    hello = agent.hello or {}
    words = str(hello.get("ssh", "")).split()
    if len(words) == 4:
        return words[0], words[2]
    return str(hello.get("launcher", "")), ""


def describe_problem(name: str, answer: Mapping[str, Any], nics: Sequence[str]) -> str:
    """Return why a host with this answer to a probe cannot take part; empty if it can."""
    if answer["endpoint"] is None:
        return (
            f"{name} cannot connect to this machine, where the ranks are to meet: tried "
            f"{describe_failures(answer['failures'])}. Let hosts connect to ports of this machine "
            f"(its firewall, or one in between), or say which network interface leads to them with "
            f"--network-interfaces"
        )
    if nics and not answer["nics"]:
        return (
            f"{name} has no interface with an address among {', '.join(nics)} "
            f"(--network-interfaces); it has {', '.join(answer['interfaces'])}"
        )
    return ""


def own_interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine at which others may reach it."""
    found = [interface_address(name) for name in own_interfaces()]
    return [address for address in found if address and not is_loopback(address)]


def describe_failures(failures: Sequence[Sequence[Any]]) -> str:
    """Return a list of ``address:port (reason)`` for people."""
    return ", ".join(
        f"{f'[{address}]' if ':' in address else address}:{port} ({reason})"
        for address, port, reason in failures
    )
