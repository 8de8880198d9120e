"""Ask Ray about the cluster: whether there is one, which nodes it has, and what these offer.

`strategy`, `elastic_v2` and `node_set` use this.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import ray

SILENT_SECONDS = 10.0
"""Seconds of waiting for room in the cluster that nobody needs to hear about."""

INTERRUPTED = "the job was interrupted, and its workers were ended"

_NAMED_NODES = 8


def require_ray() -> None:
    """Raise `RuntimeError` if no cluster is connected; Ray itself would start one here."""
    if not ray.is_initialized():
        raise RuntimeError(
            "this process is not connected to a Ray cluster: call ray.init() (a cluster of this "
            'machine alone), ray.init("auto") or ray.init("ray://HOST:10001") first'
        )


def through_client() -> bool:
    """Return whether this process reaches the cluster through Ray Client."""
    return bool(ray.util.client.ray.is_connected())


def live_nodes() -> list[Mapping[str, Any]]:
    """Return the nodes that live, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def slots_of(node: Mapping[str, Any], resources: Mapping[str, float]) -> int:
    """Return how many workers that need these resources fit on a node that runs nothing else."""
    counts = [
        int(node["Resources"].get(name, 0) // amount)
        for name, amount in resources.items()
        if amount
    ]
    return min(counts, default=1)


def describe_amounts(amounts: Mapping[str, float]) -> str:
    """Write amounts of resources as text, such as ``2 CPU and 1 GPU``."""
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "no resources"


def describe_room(names: Iterable[str]) -> str:
    """Describe how much of these resources the cluster has, and how much is free, by node.

    ``16 CPUs, of which 3 are free, on 2 nodes: 192.0.2.1 has 8 CPU (3 free); ...``
    """
    nodes, free = live_nodes(), free_by_node()
    wanted = list(names)
    totals = []
    for name in wanted:
        total = sum(node["Resources"].get(name, 0) for node in nodes)
        unused = sum(free.get(node["NodeID"], {}).get(name, 0) for node in nodes)
        part = f", of which {unused:g} {'is' if unused == 1 else 'are'} free" if free else ""
        totals.append(f"{total:g} {name}{'' if total == 1 else 's'}{part}")
    lines = []
    for node in nodes[:_NAMED_NODES]:
        unused_here = free.get(node["NodeID"], {})
        amounts = [
            f"{node['Resources'].get(name, 0):g} {name}"
            + (f" ({unused_here.get(name, 0):g} free)" if free else "")
            for name in wanted
        ]
        lines.append(f"{node['NodeManagerAddress']} has {', '.join(amounts) or 'no resources'}")
    if len(nodes) > _NAMED_NODES:
        lines.append(f"and {len(nodes) - _NAMED_NODES} more")
    count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    return f"{'; '.join(totals) or 'no resources'}, on {count}: {'; '.join(lines)}"


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Return what each node has free, by node id; nothing where Ray does not say."""
    try:
        return dict(ray._private.state.available_resources_per_node())
    except Exception:  # not part of Ray's public interface: an error message does without it
        return {}


def restore_sigterm() -> None:
    """Let SIGTERM end this process in order, so that its workers are ended before it.

    `ray.init()` installs a Python handler that raises `SystemExit`, and then its C++ part puts
    another one over it, which prints a stack and aborts. This puts the Python handler, Ray's or
    the program's own, back in force.
    """
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            signal.signal(signal.SIGTERM, handler)


def kill(actors: Iterable[Any]) -> None:
    """End actors at once; some of them may have ended already."""
    if ray.is_initialized():  # otherwise the connection is gone, and the actors with it
        for actor in actors:
            ray.kill(actor, no_restart=True)


def say(text: str) -> None:
    """Print a line where Python's stderr goes: to a terminal, a log or a notebook."""
    print(f"horovod.ray: {text}", file=sys.stderr, flush=True)
