"""The cores of one host, and each worker's share of them (``--cpu-bind``).

Part of the agent, so nothing but the standard library.
"""

from __future__ import annotations

import os

_NODES = "/sys/devices/system/node"
_CGROUPS = "/sys/fs/cgroup"


def usable_cores(folder: str = _CGROUPS, process: str = "/proc/self/cgroup") -> int:
    """How many cores this process may use: by its affinity, and by the quota of its cgroup."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    return min([cores, *_quotas(folder, process)])


def _quotas(folder: str, process: str) -> list[int]:
    """The cores that each cgroup around this process grants, rounded up; none without limits."""
    found = []
    try:
        with open(process) as file:
            path = next(line[4:] for line in file.read().split("\n") if line[:4] == "0::/")
    except (OSError, StopIteration):
        return []
    parts = path.split("/") if path else []
    for length in range(len(parts) + 1):
        try:
            with open("/".join([folder, *parts[:length], "cpu.max"])) as file:
                quota, period = file.read().split()[:2]
            if quota != "max":
                found.append(max(1, -(-int(quota) // int(period))))
        except (OSError, ValueError):
            continue
    return found


def share_of_cores(
    allowed: set[int], kind: str, index: int, count: int, nodes: list[set[int]]
) -> set[int]:
    """The cores for worker ``index`` of ``count`` on this host.

    "core": the allowed cores in even parts, at least one each. "numa": all allowed cores of one
    NUMA node; the workers are spread evenly over the nodes.
    """
    cores = sorted(allowed)
    if kind == "numa":
        parts = [node & allowed for node in nodes if node & allowed] or [allowed]
        return parts[index * len(parts) // count]
    first = index * len(cores) // count
    return set(cores[first : max(first + 1, (index + 1) * len(cores) // count)])


def numa_nodes(folder: str = _NODES) -> list[set[int]]:
    """The cores of every NUMA node; empty where the system does not tell."""
    found = []
    try:
        names = [name for name in os.listdir(folder) if name[:4] == "node" and name[4:].isdigit()]
        for name in sorted(names, key=lambda name: int(name[4:])):
            with open(f"{folder}/{name}/cpulist") as file:
                found.append(parse_cores(file.read()))
    except OSError:
        return []
    return found


def parse_cores(text: str) -> set[int]:
    """The numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
