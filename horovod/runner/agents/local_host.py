"""The host that an agent runs on: its cores, programs and processes.

`host_facts` makes the event "hello"; `share_of_cores` is for ``--cpu-bind``. The rest finds
programs and the descendants of a process, and sends signals. This module is a part of the agent, so
it uses the standard library alone; the launcher uses it too.
"""

from __future__ import annotations

import errno
import os
import time

TYPE_CHECKING = False  # as in typing, whose import would delay the agent's start
if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from typing import Any

    from horovod.runner.agents.agent_streams import WorkerInput

_NODES = "/sys/devices/system/node"
_CGROUPS = "/sys/fs/cgroup"
_PR_SET_CHILD_SUBREAPER = 36
_SIGKILL, _SIGTERM = 9, 15  # the module `signal` takes long to import
_LOOK_SECONDS = 0.05

AGENT_NAME = "horovodrun-agent"
"""The last word of an agent's command line."""


class WorkerProcess:
    """One worker. It is kept after its end, because processes that it started may live on."""

    def __init__(self, number: int, pid: int) -> None:
        self.number = number
        self.pid = pid  # it leads a session and a process group
        self.running = True
        self.deadline: float | None = None
        self.killing = False
        self.input: WorkerInput | None = None


def usable_cores(folder: str = _CGROUPS, process: str = "/proc/self/cgroup") -> int:
    """Return how many cores this process may use, by its affinity and its cgroup's quota.

    Args:
        folder: Where the cgroups are mounted.
        process: The file that names the cgroup of this process.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    return min([cores, *_quotas(folder, process)])


def _quotas(folder: str, process: str) -> list[int]:
    """Return the limits of all cgroups around this process, in cores, rounded up."""
    limits = []
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
                limits.append(max(1, -(-int(quota) // int(period))))
        except (OSError, ValueError):
            continue
    return limits


def share_of_cores(
    allowed: set[int], kind: str, index: int, count: int, nodes: list[set[int]]
) -> set[int]:
    """Return the cores for one worker of this host.

    Args:
        allowed: The cores that the agent may use.
        kind: "core" deals the allowed cores out in even parts, at least one each; "numa" gives all
            allowed cores of one NUMA node, with the workers spread evenly over the nodes.
        index: The worker's local rank.
        count: How many workers share the host.
        nodes: The cores of each NUMA node, from `numa_nodes`.
    """
    cores = sorted(allowed)
    if kind == "numa":
        parts = [node & allowed for node in nodes if node & allowed] or [allowed]
        return parts[index * len(parts) // count]
    first = index * len(cores) // count
    return set(cores[first : max(first + 1, (index + 1) * len(cores) // count)])


def numa_nodes(folder: str = _NODES) -> list[set[int]]:
    """Return the cores of every NUMA node; nothing where the system does not say."""
    nodes = []
    try:
        names = [name for name in os.listdir(folder) if name[:4] == "node" and name[4:].isdigit()]
        for name in sorted(names, key=lambda name: int(name[4:])):
            with open(f"{folder}/{name}/cpulist") as file:
                nodes.append(parse_cores(file.read()))
    except OSError:
        return []
    return nodes


def parse_cores(text: str) -> set[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def host_facts() -> dict[str, Any]:
    """Return the content of the event "hello": process, host, and the addresses on the way here."""
    return {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "machine": os.uname().machine,
        "cores": usable_cores(),
        "ssh": os.environ.get("SSH_CONNECTION", ""),
        "launcher": os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""),
    }


def become_subreaper() -> None:
    """Make this process the new parent of its descendants whose own parent ends."""
    arguments = (_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # The inner module of ctypes, whose own import takes 5 ms.
        from _ctypes import call_function, dlopen, dlsym

        program: Any = None  # this process, with the libraries that it has loaded
        call_function(dlsym(dlopen(program, 0), "prctl"), arguments)
    except (ImportError, OSError):
        pass  # not Linux: process groups are all we can end


def find_program(name: str, path: str) -> str:
    """Return the file that a command names, as a shell would find it on ``path``.

    Raises:
        FileNotFoundError: If there is no such program.
    """
    if "/" in name:
        return name
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder or ".", name)
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, "command not found", name)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each of these processes that still runs."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def signal_groups(pids: Iterable[int], number: int) -> None:
    """Send a signal to the process groups that these processes lead."""
    for pid in pids:
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def find_descendants(ancestor: int) -> list[int]:
    """Return this process's descendants that are below ``ancestor`` or in the session it leads.

    Parents come before children. The list is empty where there is no /proc.
    """
    children: dict[int, list[int]] = {}
    sessions: dict[int, int] = {}
    for pid, parent, session in _processes():
        children.setdefault(parent, []).append(pid)
        sessions[pid] = session
    found: list[int] = []
    level = [(os.getpid(), os.getpid() == ancestor)]
    while level:
        level = [
            (pid, inside or pid == ancestor or sessions[pid] == ancestor)
            for parent, inside in level
            for pid in children.get(parent, ())
        ]
        found += [pid for pid, inside in level if inside]
    return found


def _processes() -> list[tuple[int, int, int]]:
    """Return pid, parent and session of each process of this host; nothing without /proc."""
    found = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # After the last ")": the program's name may itself have parentheses.
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            found.append((int(name), int(fields[1]), int(fields[3])))
    return found


def end_leftovers(agent: int, workers: Iterable[int], mark: str, grace: float) -> None:
    """End what a lost agent has left on this host, and the agent itself if it still runs.

    Pids are used again, at the latest after a reboot. So the agent's pid is killed only if its
    command line is an agent's, and other processes only if their environment has this job's mark.

    Args:
        agent: The agent's process.
        workers: The processes that it has started, each of which leads a session.
        mark: A variable that only this job's processes have, as ``NAME=value``.
        grace: Seconds between SIGTERM and SIGKILL. A living agent ends its workers meanwhile.
    """
    leaders = set(workers)
    left = _find_sessions(leaders, mark)
    signal_all(left, _SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and (left or AGENT_NAME in _words(agent, "cmdline")):
        time.sleep(_LOOK_SECONDS)
        left = _find_sessions(leaders, mark)
    if AGENT_NAME in _words(agent, "cmdline"):
        signal_all([agent], _SIGKILL)
    while left and time.monotonic() < deadline + grace:  # one may hang in the kernel
        signal_all(left, _SIGKILL)
        time.sleep(_LOOK_SECONDS)
        left = _find_sessions(leaders, mark)


def _find_sessions(leaders: Container[int], mark: str) -> list[int]:
    """Return the processes of these sessions that have the variable `mark`."""
    inside = [pid for pid, _, session in _processes() if session in leaders]
    return [pid for pid in inside if mark in _words(pid, "environ")]


def _words(pid: int, name: str) -> list[str]:
    """Return the words in a file of /proc/<pid>; none where we may not read it."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read().decode("utf-8", "surrogateescape").split("\0")
    except OSError:
        return []
