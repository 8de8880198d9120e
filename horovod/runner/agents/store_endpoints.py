"""The job's store, in which the ranks find each other, and the addresses that serve it.

A job opens a `StoreEndpoints`. When all workers are on this machine it listens on loopback alone.
Otherwise the agents have said how they were reached; `addresses_towards` turns that into
addresses of this machine, each host tries them (`probe`), and endpoints that no host needs are
closed.
"""

from __future__ import annotations

import _socket
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from horovod.common.joining.addresses import LOOPBACK, is_local, is_loopback, resolve
from horovod.common.store import MemoryStore, StoreServer
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.probe import interface_address, reserve_port, source_towards

Endpoint = tuple[str, int]
"""An address and a port."""

OPTION = "--network-interfaces"


class StoreEndpoints:
    """The job's store and its servers."""

    def __init__(self, key: bytes, store: MemoryStore | None = None) -> None:
        self.key = key
        self.store = MemoryStore() if store is None else store
        self._servers: dict[str, StoreServer] = {}
        self._reserved: list[_socket.socket] = []

    @property
    def endpoints(self) -> list[Endpoint]:
        return [(server.address, server.port) for server in self._servers.values()]

    def open(self, address: str) -> Endpoint:
        """Serve the store at this address of this machine, unless it already is."""
        if address not in self._servers:
            self._servers[address] = StoreServer(address, self.key, store=self.store)
        return address, self._servers[address].port

    def open_towards(
        self, hosts: Mapping[str, tuple[str, str]], nics: Sequence[str], option: str = OPTION
    ) -> str:
        """Serve the store at addresses at which these hosts may reach it.

        Args:
            hosts: Both addresses of the connection to each host, ours first; empty if unknown.
            nics: The network interfaces to use; any if empty.
            option: What the user calls the list of interfaces.

        Returns:
            A description of the problem; empty if there is none.
        """
        for name, ends in hosts.items():
            for address in addresses_towards(name, ends, nics):
                self.open(address)
        if self.endpoints:
            return ""
        return describe_own_problem(nics, option) or (
            f"cannot tell which address of this machine leads to {', '.join(hosts)}; say which "
            f"network interface does with {option}"
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
        ends = {agent.name: connection_ends(agent) for agent in agents}
        remote = {agent.name: ends[agent.name] for agent in agents if agent.remote}
        if not remote:
            self.open(LOOPBACK)
        problem = self.open_towards(remote, nics)
        if problem:
            return problem
        here = self.endpoints[0][0]
        for agent in agents:
            others = [theirs or here for name, (_, theirs) in ends.items() if name != agent.name]
            agent.probe(self.question(nics, timeout, others))
        return ""

    def question(
        self, nics: Sequence[str], timeout: float, towards: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the request with which `probe.probe` finds an endpoint that its host reaches.

        Args:
            nics: The network interfaces to use; any if empty.
            timeout: Seconds for an attempt to connect.
            towards: Addresses of other hosts, which reach this one at the address to be found.
        """
        return {
            "endpoints": self.endpoints,
            "key": self.key.hex(),
            "timeout": timeout,
            "nics": list(nics),
            "towards": list(towards),
        }

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
    if not found and not theirs:
        found = [interface_address(nic) for nic in own_interfaces()]
    return [address for address in found if address and not is_loopback(address)]


def connection_ends(agent: HostAgent) -> tuple[str, str]:
    """Return both addresses of the connection to an agent, ours first; empty if unknown."""
    if any(agent.link.ends) or not agent.remote:
        return agent.link.ends
    hello = agent.hello or {}
    words = str(hello.get("ssh", "")).split()
    if len(words) == 4:
        return words[0], words[2]
    return str(hello.get("launcher", "")), ""


def describe_problem(answer: Mapping[str, Any], nics: Sequence[str], option: str = OPTION) -> str:
    """Return why a host with this answer to a probe cannot take part.

    Args:
        answer: The answer of `probe.probe`.
        nics: The network interfaces to use; any if empty.
        option: What the user calls the list of interfaces.

    Returns:
        The part of a sentence after the name of the host; empty if the host can take part.
    """
    if answer["endpoint"] is None:
        tried = ", ".join(
            f"{f'[{address}]' if ':' in address else address}:{port} ({reason})"
            for address, port, reason in answer["failures"]
        )
        return (
            f"cannot connect to this machine, where the ranks are to meet: tried {tried}. Let "
            f"hosts connect to ports of this machine (its firewall, or one in between), or say "
            f"which network interface leads to them with {option}"
        )
    if nics and not answer["nics"]:
        return _describe_missing(nics, answer["interfaces"], option)
    return ""


def describe_own_problem(nics: Sequence[str], option: str = OPTION) -> str:
    """Return why this machine cannot serve the store at these interfaces; empty if it can.

    `option` is what the user calls the list of interfaces.
    """
    if not nics or any(interface_address(name) for name in nics):
        return ""
    return f"this machine {_describe_missing(nics, own_interfaces(), option)}"


def _describe_missing(nics: Sequence[str], interfaces: Sequence[str], option: str) -> str:
    return (
        f"has no interface with an address among {', '.join(nics)} ({option}); it has "
        f"{', '.join(interfaces)}"
    )


def own_interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]
