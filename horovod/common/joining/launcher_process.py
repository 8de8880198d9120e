"""Finds the launcher among this process's ancestors (Linux).

Some MPI launchers give the job no name. Their ranks on one host still have one common ancestor,
whose process id and start time name the job there. Used by `horovod.common.joining.rendezvous`.
"""

from __future__ import annotations

import os
from pathlib import Path

_LAUNCHERS = {
    "hydra_pmi_proxy",
    "jsmd",
    "mpiexec",
    "mpiexec.hydra",
    "mpirun",
    "mpirun_rsh",
    "mpispawn",
    "orted",
    "orterun",
    "palsd",
    "prted",
    "prterun",
    "slurmstepd",
}
_NAME_LENGTH = 15
"""Characters of a process's name that the kernel keeps."""


def launcher_process() -> str:
    """Return a name for the launcher's process, or for our parent where no launcher is known."""
    known = {name[:_NAME_LENGTH] for name in _LAUNCHERS}
    pid = os.getppid()
    while pid > 1:
        process = _read(pid)
        if process is None:
            break
        name, parent, started = process
        if name in known:
            return f"{pid}.{started}"
        pid = parent
    process = _read(os.getppid())
    return f"{os.getppid()}.{process[2] if process else 0}"


def _read(pid: int) -> tuple[str, int, int] | None:
    """Return name, parent and start time of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may itself contain spaces and parentheses.
    before, _, after = text.rpartition(")")
    fields = after.split()
    return before.partition("(")[2], int(fields[1]), int(fields[19])
