"""Variables that the programs started by a rank inherit, and must not take for their own.

A subprocess has the variables of its parent, and with them those that say which rank of which job
it is. If it called ``init()`` it would wait for ranks that have long found each other. `init`
therefore leaves a mark in the environment, and refuses where it finds the mark of another process.
`clean_environment`, which users know as ``horovod.clean_environment``, is for programs that start a
job of their own, or none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from horovod.common.environments import detect
from horovod.common.generations.membership import WORKER_ID, is_elastic
from horovod.common.joining.launcher_store import STORE_ADDRESS, STORE_PORT

MARK = "_HOROVOD_PROCESS"

_OF_A_JOB = re.compile(
    r"_HOROVOD_.*"
    r"|HOROVOD_(RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE)|HOSTNAME|ELASTIC|WORKER_ID|CONTROLLER)"
    r"|HOROVOD_GLOO_(RENDEZVOUS_.*|IFACE)|HOROVOD_LAUNCHER_TTY"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT)"
    r"|(OMPI_COMM_|PMI_|PMIX_|PMI2_|PRTE_|MPIR_|MPI_LOCAL|MV2_COMM_|JSM_|TORCHELASTIC_).*"
    r"|SLURM_(PROCID|LOCALID|NTASKS|STEP_.*|STEPID|TASKS_PER_NODE)"
)


def clean_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without the variables that make a process a rank of a job.

    Use it for programs that a rank starts and that do not belong to its job:
    ``subprocess.run(command, env=horovod.clean_environment())``. Knobs stay as they are.

    Args:
        environ: The environment to clean; by default that of this process.

    Examples:
        >>> subprocess.run(["python", "other.py"], env=horovod.clean_environment())
    """
    return {name: value for name, value in environ.items() if not _OF_A_JOB.fullmatch(name)}


def mark_process(size: int, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Mark this process as a rank, so that programs which it starts know that they are not."""
    identity = _identity(environ)
    if size > 1 and identity is not None:
        environ[MARK] = f"{os.getpid()} {identity}"


def unmark_process(environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Remove the mark of this process."""
    if environ.get(MARK, "").startswith(f"{os.getpid()} "):
        del environ[MARK]


def check_not_inherited(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if another living process is the rank that our environment says we are."""
    pid, _, identity = environ.get(MARK, "").partition(" ")
    if not pid.isdecimal() or int(pid) == os.getpid() or identity != _identity(environ):
        return
    if not os.path.exists(f"/proc/{pid}"):
        return
    who = identity.partition(" ")[0].replace("-", " ")
    raise ValueError(
        f"{who} of this job is process {pid} already, from "
        f"which this one (process {os.getpid()}) inherited its environment. A program that a rank "
        f"starts is no rank: let it do without init(), or start it without what the launcher told "
        f"the rank, for example with subprocess.run(..., env=horovod.clean_environment()) or "
        f"'env -u HOROVOD_RANK -u HOROVOD_SIZE ...'. Then it is alone, or can start a job of its "
        f"own with horovodrun or horovod.run"
    )


def _identity(environ: Mapping[str, str]) -> str | None:
    """Return which rank (or elastic worker) of which job the environment names, if any."""
    store = f"{environ.get(STORE_ADDRESS)}:{environ.get(STORE_PORT)}"
    if is_elastic(environ):
        return f"worker-{environ[WORKER_ID]} {store}"
    try:
        environment = detect(environ)
        return f"rank-{environment.claim()[0]} {environment.job_id() or store}"
    except ValueError:
        return None  # with a communicator, `init` needs no variables
