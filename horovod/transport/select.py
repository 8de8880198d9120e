"""Choosing how a group's bytes move, and saying why. Called by the engine for each process set.

| ranks | what moves CPU tensors |
|---|---|
| one process | nothing |
| one host | shared memory; TCP where descriptors cannot be handed over |
| several hosts, some with several ranks | shared memory inside, TCP between |
| several hosts, one rank each | TCP |
| MPI was asked for | MPI |

Device tensors go through NCCL (CUDA) or XCCL (XPU). These libraries refuse ranks that share a
device, so such ranks copy their tensors through host memory. Whether ranks share one is judged the
way NCCL does.

HOROVOD_CPU_OPERATIONS, HOROVOD_CONTROLLER, HOROVOD_HIERARCHICAL_ALLREDUCE and
HOROVOD_HIERARCHICAL_ALLGATHER choose explicitly. Every rank takes the same decision, because it
rests on what the ranks published and on knobs that are the same everywhere.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from horovod.common import mpi
from horovod.common.host import host_identity
from horovod.common.logging import get_logger
from horovod.common.store import PrefixStore
from horovod.transport.base import Group, SingleTransport, Transport
from horovod.transport.host.segments import SharedMemoryUnavailable
from horovod.transport.host.shared_memory import SharedMemoryTransport

if TYPE_CHECKING:
    from horovod.transport.device.process_group import DeviceTransport

logger = get_logger(__name__)


def by_host(identities: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, given every rank's host; hosts in order of first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return list(hosts.values())


def ranks_of_machine(identities: Sequence[str], rank: int) -> int:
    """Return how many ranks share the cores of this rank's machine, this one included.

    Args:
        identities: `host_identity` of each rank. Containers of one machine are different hosts, but
            have the same kernel.
        rank: This rank.
    """
    kernels = [identity.rsplit("/", 2)[-2:-1] for identity in identities]
    return kernels.count(kernels[rank])


def for_host_memory(group: Group, hosts: Sequence[Sequence[int]]) -> tuple[Transport, str]:
    """Choose and connect the transport for CPU tensors. Collective over the group.

    Args:
        group: The ranks.
        hosts: The group's ranks, host by host.

    Returns:
        The transport, and the reason for the choice, for people.

    Raises:
        ValueError: The transport that a knob asks for cannot be used.
    """
    config = group.config
    wanted = config.cpu_operations or ("mpi" if config.controller == "mpi" else None)
    if group.size == 1:
        return SingleTransport(group), "one process"
    if wanted == "mpi":
        return _mpi(group), "MPI was asked for"
    if len(hosts) == 1 and wanted != "gloo":
        return _on_one_host(group, must=wanted == "shm")
    if wanted == "shm":
        raise ValueError(
            f"HOROVOD_CPU_OPERATIONS=shm, but the ranks are on {len(hosts)} hosts: shared memory "
            f"works on one host only; unset it to use shared memory inside hosts and TCP between"
        )
    if wanted == "gloo" and not config.hierarchical_allreduce:
        return _tcp(group), "TCP was asked for"
    if len(hosts) == group.size:
        return _tcp(group), f"{len(hosts)} hosts with one rank each"
    if config.hierarchical_allreduce is False and config.hierarchical_allgather is False:
        return _tcp(group), "hierarchical operations are switched off"
    return _hierarchical(group, hosts)


def _on_one_host(group: Group, must: bool) -> tuple[Transport, str]:
    """Use shared memory, or TCP where there is none, unless it `must` be shared memory."""
    try:
        transport = SharedMemoryTransport(group)
    except SharedMemoryUnavailable as error:
        if must:
            raise ValueError(f"HOROVOD_CPU_OPERATIONS=shm, but {error}") from error
        if group.rank == 0:
            logger.warning("no shared memory (%s): using TCP, which is slower", error)
        return _tcp(group), f"shared memory failed: {error}"
    if transport.peer_memory:
        return transport, "all ranks on one host"
    return transport, (
        "all ranks on one host; large tensors are staged, because the kernel does not let ranks "
        "access each other's memory (see ptrace_scope, or CAP_SYS_PTRACE in containers)"
    )


def _hierarchical(group: Group, hosts: Sequence[Sequence[int]]) -> tuple[Transport, str]:
    """Use one transport inside each host, and TCP between hosts."""
    from horovod.transport.hierarchical import HierarchicalTransport

    host = next(i for i, ranks in enumerate(hosts) if group.rank in ranks)
    index = list(hosts[host]).index(group.rank)
    inside = _subgroup(group, hosts[host], f"host{host}/")
    # The choice of TCP was meant for between hosts.
    config = dataclasses.replace(group.config, cpu_operations=None, controller=None)
    inside = dataclasses.replace(inside, config=config)
    local = for_host_memory(inside, [range(inside.size)])[0]
    carriers = min(len(ranks) for ranks in hosts)
    cross = None
    if index < carriers:
        cross = _tcp(_subgroup(group, [ranks[index] for ranks in hosts], f"cross{index}/"))
    transport = HierarchicalTransport(group, local, cross, hosts, _tcp(group))
    return transport, f"{len(hosts)} hosts, {local.name} inside and TCP between them"


def _subgroup(group: Group, members: Sequence[int], prefix: str) -> Group:
    """Return the group of some ranks, one of which we are."""
    return Group(
        rank=list(members).index(group.rank),
        size=len(members),
        global_ranks=tuple(group.global_ranks[rank] for rank in members),
        store=PrefixStore(group.store, prefix),
        config=group.config,
    )


def _tcp(group: Group) -> Transport:
    """Connect the ranks over TCP."""
    from horovod.transport.network.tcp import TcpTransport

    return TcpTransport(dataclasses.replace(group, store=PrefixStore(group.store, "tcp/")))


def _mpi(group: Group) -> Transport:
    """Connect the ranks over MPI."""
    try:
        mpi.initialise(not group.config.mpi_threads_disable)
        from horovod.transport.mpi import MpiTransport, communicator_of
    except ImportError as error:
        raise ValueError(
            f"MPI was asked for (HOROVOD_CPU_OPERATIONS or HOROVOD_CONTROLLER), but mpi4py cannot "
            f"be imported: {error}. Install it with: pip install mpi4py"
        ) from error
    return MpiTransport(group, communicator_of(group))


def for_device(
    group: Group, host: Transport, neighbours: int, device: torch.device, purpose: str = ""
) -> Transport:
    """Return the transport for tensors on `device`. Collective over the group.

    Args:
        group: The ranks.
        host: Their transport for host memory, which serves where the device's library cannot.
        neighbours: Number of the job's ranks that share this machine's cores.
        device: The device of this rank.
        purpose: Name that tells apart several transports of one group; each has a communicator.
    """
    from horovod.transport.device.host_copy import HostCopyTransport

    part = f"{purpose}/device-{device.type}/" if purpose else f"device-{device.type}/"
    kind = device_transports().get(device.type)
    if kind is None:
        return HostCopyTransport(group, host)
    # Under a prefix of their own, because the keys of the library are small numbers too.
    names = _exchange(group, f"{part}names/", _device_identity(device))
    shared = _sharing(group, names)
    if shared:
        if group.rank == 0 and not purpose:
            logger.warning(
                "%s, and %s takes one rank for each device: these tensors go through host memory "
                "(%s), which is slower. Give each rank a device of its own, for example by "
                "torch.cuda.set_device(hvd.local_rank()) after hvd.init()",
                shared,
                kind.name,
                host.name,
            )
        return HostCopyTransport(group, host)
    own = dataclasses.replace(group, store=PrefixStore(group.store, f"{part}{kind.name}/"))
    kind.prepare_process(neighbours)
    transport = kind(own, device, host)
    if group.rank == 0:
        where = f" ({purpose})" if purpose else ""
        logger.info("%s tensors: through %s%s", device.type, transport.name, where)
    return transport


def device_transports() -> dict[str, type[DeviceTransport]]:
    """Return the class that moves the tensors of each type of device."""
    from horovod.transport.device.process_group import NcclTransport, XcclTransport

    return {"cuda": NcclTransport, "xpu": XcclTransport}


def _exchange(group: Group, prefix: str, mine: str) -> list[str]:
    """Publish `mine` under `prefix`, and return what every rank has published there."""
    store = PrefixStore(group.store, prefix)
    store.set(f"{group.rank}", mine.encode())
    timeout = group.config.start_timeout
    return [store.get(f"{rank}", timeout).decode() for rank in range(group.size)]


def _device_identity(device: torch.device) -> str:
    """Name a device the way NCCL does: two ranks with the same name would share it.

    NCCL_HOSTID stands for the host where it is set, so that ranks with different ones may have the
    same device.
    """
    host = os.environ.get("NCCL_HOSTID") or host_identity()
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_properties"):
        return f"{host}/{device}\n{device}"
    properties = module.get_device_properties(device)
    return f"{host}/{getattr(properties, 'uuid', device)}\n{device} ({properties.name})"


def _sharing(group: Group, identities: Sequence[str]) -> str:
    """Say which ranks share which device; empty if none do."""
    users: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        users.setdefault(identity.partition("\n")[0], []).append(rank)
    sentences = []
    for ranks in users.values():
        if len(ranks) > 1:
            who = ", ".join(str(group.global_ranks[rank]) for rank in ranks)
            sentences.append(f"ranks {who} share {identities[ranks[0]].partition(chr(10))[2]}")
    return "; ".join(sentences)
