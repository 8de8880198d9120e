"""Take the Python stack of a worker on this host, when the launcher asks for it.

The agent gets this file when other ranks wait for a worker, and calls `take_stack`. py-spy reads
the stack out of the worker's memory without stopping it (``--nonblocking``), and shows no values of
variables. This module runs in the agent, so it uses the standard library alone.
"""

from __future__ import annotations

import os
import subprocess
import sys

from horovod.runner.agents.local_host import find_descendants, find_program

TYPE_CHECKING = False  # as in typing, whose import would delay the agent
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_PATIENCE = 10.0
_LONGEST = 16_000  # characters

NOT_INSTALLED = (
    "py-spy is not installed on this host: after pip install 'horovod[stacks]' there, this shows "
    "where a rank is that others wait for"
)


def take_stack(request: Mapping[str, Any], launched: Mapping[int, int]) -> dict[str, Any]:
    """Return the Python stacks of a worker.

    Args:
        request: The worker's ``id``, and its process ``pid`` as the worker reported it.
        launched: The processes that the agent has started, by worker. Only a worker's own process
            or a descendant of it is looked at.

    Returns:
        The ``id`` and a ``text``: the stacks, or a sentence that says why there are none.
    """
    number, pid = request["id"], request["pid"]
    first = launched.get(number)
    if first is None or (pid != first and pid not in find_descendants(first)):
        text = f"process {pid} does not belong to this worker, or has ended"
    else:
        text = _ask_py_spy(pid)
    return {"id": number, "text": text}


def _ask_py_spy(pid: int) -> str:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    try:
        program = find_program("py-spy", path)
    except FileNotFoundError:
        return NOT_INSTALLED
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer within {_PATIENCE:.0f} s"
    except OSError as error:
        return f"py-spy cannot be started: {error.strerror}"
    text = done.stdout.decode(errors="replace").strip()
    if "Permission denied" in text or "EPERM" in text or "Operation not permitted" in text:
        return (
            "py-spy may not read the worker's memory: the system allows that to root alone "
            "(/proc/sys/kernel/yama/ptrace_scope), or the container does not (SYS_PTRACE)"
        )
    return trim_answer(text)[:_LONGEST] or "py-spy has nothing to say"


def trim_answer(said: str) -> str:
    """Remove from py-spy's answer what nobody should see or needs to see.

    That is the text before the stacks, which has the command line, whose arguments may be private;
    and Horovod's own threads, which wait for something in every rank.
    """
    head, *threads = f"\n{said}".split("\nThread ")
    if not threads:
        return head.strip()
    kept = [each.rstrip() for each in threads if '"horovod-' not in each.split("\n")[0]]
    return "\n".join(f"Thread {each}" for each in kept)
