"""Find programs, find descendants of a process, and send signals.

This module is a part of the agent, so it uses the standard library alone; the launcher uses it too.
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
    """Make this process the new parent of its descendants whose own parent ends."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (AttributeError, OSError):
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
