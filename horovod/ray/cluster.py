"""Questions to Ray about the cluster: is there one, which nodes, what do they have.

Used by strategy, discovery and node_set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ray


def require_ray() -> None:
    """`RuntimeError` unless this process is connected to a cluster. Ray would start one here."""
    if not ray.is_initialized():
        raise RuntimeError(
            "this process is not connected to a Ray cluster: call ray.init() (a cluster of this "
            'machine alone), ray.init("auto") or ray.init("ray://HOST:10001") first'
        )


def through_client() -> bool:
    """Whether this process reaches the cluster through Ray Client."""
    return bool(ray.util.client.ray.is_connected())


def live_nodes() -> list[Mapping[str, Any]]:
    """The nodes that live, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def slots_of(node: Mapping[str, Any], resources: Mapping[str, float]) -> int:
    """How many workers with these needs fit on a node that runs nothing else."""
    counts = [
        int(node["Resources"].get(name, 0) // amount)
        for name, amount in resources.items()
        if amount
    ]
    return min(counts, default=1)


def describe_amounts(amounts: Mapping[str, float]) -> str:
    """``2 CPU and 1 GPU``."""
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "no resources"


def describe_cluster(names: Iterable[str]) -> str:
    """What nodes there are and what they have and have free of these resources, for people."""
    free = _free_by_node()
    lines = []
    for node in live_nodes():
        have = node["Resources"]
        unused = free.get(node["NodeID"], {})
        parts = [
            f"{have.get(name, 0):g} {name}" + (f" ({unused.get(name, 0):g} free)" if free else "")
            for name in names
        ]
        lines.append(f"{node['NodeManagerAddress']} has {', '.join(parts) or 'no resources'}")
    count = len(lines)
    return f"{count} node{'' if count == 1 else 's'}: {'; '.join(lines)}"


def _free_by_node() -> dict[str, Mapping[str, float]]:
    try:
        return dict(ray._private.state.available_resources_per_node())
    except Exception:  # not part of Ray's public interface: an error message does without it
        return {}


def kill(actors: Iterable[Any]) -> None:
    """End actors at once; those that have ended already are fine."""
    if ray.is_initialized():  # else the connection is gone, and they with it
        for actor in actors:
            ray.kill(actor, no_restart=True)
