"""Processes of one host: finding a program, finding and signalling a family.

Part of the agent, so nothing but the standard library; also used by the launcher itself.
"""

from __future__ import annotations

import ctypes
import errno
import os

TYPE_CHECKING = False  # as in typing, whose import would delay the agent's start
if TYPE_CHECKING:
    from collections.abc import Iterable

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """From now on orphans among our descendants become our children."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (AttributeError, OSError):
        pass  # not Linux: process groups are all we can end


def find_program(name: str, path: str) -> str:
    """The file that a command names, as a shell would find it."""
    if "/" in name:
        return name
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder or ".", name)
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, "command not found", name)


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def signal_groups(pids: Iterable[int], number: int) -> None:
    """The process groups that these processes lead."""
    for pid in pids:
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def family(ancestor: int) -> list[int]:
    """Our descendants that are below ``ancestor`` or in the session it leads; parents first.

    Empty where there is no /proc.
    """
    children: dict[int, list[int]] = {}
    sessions: dict[int, int] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()  # the name may hold anything
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
            sessions[int(name)] = int(fields[3])
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
