"""Choosing how a group's bytes move, and saying why. Called by the engine for each process set.

| members | CPU tensors |
|---|---|
| one process | nothing to move |
| one host | shared memory; TCP where descriptors cannot be handed over |
| several hosts, some with several ranks | shared memory inside, TCP between |
| several hosts, one rank each | TCP |
| MPI was asked for | MPI |

Device tensors go through NCCL (CUDA) or XCCL (XPU); ranks that share a device, which those
libraries refuse, stage them through host memory. HOROVOD_CPU_OPERATIONS, HOROVOD_CONTROLLER,
HOROVOD_HIERARCHICAL_ALLREDUCE and HOROVOD_HIERARCHICAL_ALLGATHER choose explicitly. Every rank
takes the same decision, because it rests on what the ranks published and on knobs that are the
same everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from horovod.common import mpi
from horovod.common.host import host_identity
from horovod.common.logging import get_logger
from horovod.common.store import PrefixStore
from horovod.transport.base import Group, Transport
from horovod.transport.segments import SharedMemoryUnavailable
from horovod.transport.shared_memory import SharedMemoryTransport

logger = get_logger(__name__)


def by_host(identities: Sequence[str]) -> list[list[int]]:
    """Ranks grouped by host, hosts in the order of their first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return list(hosts.values())


def for_host_memory(group: Group, hosts: Sequence[Sequence[int]]) -> tuple[Transport, str]:
    """The transport for CPU tensors, and the reason for people. Collective over the group."""
    config = group.config
    wanted = config.cpu_operations or ("mpi" if config.controller == "mpi" else None)
    if group.size == 1:
        from horovod.transport.single import SingleTransport

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
    from horovod.transport.hierarchical import HierarchicalTransport

    host = next(i for i, ranks in enumerate(hosts) if group.rank in ranks)
    index = list(hosts[host]).index(group.rank)
    inside = _subgroup(group, hosts[host], f"host{host}/")
    local = for_host_memory(_without_choice(inside), [range(inside.size)])[0]
    carriers = min(len(ranks) for ranks in hosts)
    cross = None
    if index < carriers:
        cross = _tcp(_subgroup(group, [ranks[index] for ranks in hosts], f"cross{index}/"))
    transport = HierarchicalTransport(group, local, cross, hosts, _tcp(group))
    return transport, f"{len(hosts)} hosts, {local.name} inside and TCP between them"


def _without_choice(group: Group) -> Group:
    """The same group, free to use shared memory although TCP was asked for between hosts."""
    config = dataclasses.replace(group.config, cpu_operations=None, controller=None)
    return dataclasses.replace(group, config=config)


def _subgroup(group: Group, members: Sequence[int], prefix: str) -> Group:
    return Group(
        rank=list(members).index(group.rank),
        size=len(members),
        global_ranks=tuple(group.global_ranks[rank] for rank in members),
        store=PrefixStore(group.store, prefix),
        config=group.config,
    )


def _tcp(group: Group) -> Transport:
    from horovod.transport.tcp import TcpTransport

    return TcpTransport(dataclasses.replace(group, store=PrefixStore(group.store, "tcp/")))


def _mpi(group: Group) -> Transport:
    try:
        mpi.initialised(not group.config.mpi_threads_disable)
        from horovod.transport.mpi import MpiTransport, communicator_of
    except ImportError as error:
        raise ValueError(
            f"MPI was asked for (HOROVOD_CPU_OPERATIONS or HOROVOD_CONTROLLER), but mpi4py cannot "
            f"be imported: {error}. Install it with: pip install mpi4py"
        ) from error
    return MpiTransport(group, communicator_of(group))


def for_device(group: Group, host: Transport, device: torch.device) -> Transport:
    """The transport for tensors on `device`. Collective over the group."""
    store = PrefixStore(group.store, f"device-{device.type}/")
    group = dataclasses.replace(group, store=store)
    store.set(f"{group.rank}", f"{host_identity()}/{_device_name(device)}".encode())
    timeout = group.config.start_timeout
    names = [store.get(f"{rank}", timeout) for rank in range(group.size)]
    from horovod.transport import process_group
    from horovod.transport.host_copy import HostCopyTransport

    kind = {"cuda": "NcclTransport", "xpu": "XcclTransport"}.get(device.type)
    if kind is None:
        return HostCopyTransport(group, host)
    if len(set(names)) < len(names):
        if group.rank == 0:
            logger.warning(
                "ranks share a %s device, which its collectives library refuses: device tensors "
                "go through host memory (%s), which is slower; give each rank a device of its own",
                device.type,
                host.name,
            )
        return HostCopyTransport(group, host)
    transport: Transport = getattr(process_group, kind)(group, device)
    if group.rank == 0:
        logger.info("%s tensors: %s", device.type, transport.name)
    return transport


def _device_name(device: torch.device) -> str:
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", None) or device)
