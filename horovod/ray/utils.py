"""Functions about network interfaces that programs for Horovod 0.28.1 import from here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from horovod.ray.adapter import nics_of

__all__ = ["detect_nics", "nics_to_env_var"]


def detect_nics(
    settings: Any, all_host_names: Sequence[str] = (), node_workers: Sequence[Any] | None = None
) -> list[str]:
    """Return the interfaces for traffic between workers: those that the settings name, or those
    with the address by which Ray knows a node, on all nodes of `node_workers`.

    Jobs need not call this: every worker finds its way by itself.
    """
    if nics_of(settings):
        return nics_of(settings)
    found = ray.get([worker.execute.remote(_interfaces) for worker in node_workers or ()])
    common = set(found[0]).intersection(*found[1:]) if found else set()
    return sorted(common)


def nics_to_env_var(nics: Sequence[str]) -> dict[str, str]:
    """Return the variables that keep a worker's traffic on these interfaces."""
    from horovod.runner.api import interface_variables

    return interface_variables(list(nics))


def _interfaces(executable: object) -> list[str]:
    import psutil

    address = ray.util.get_node_ip_address()
    return [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.address == address for entry in entries)
    ]
