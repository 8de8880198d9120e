"""What programs that a rank starts inherit from it, and what they must not do with it.

A subprocess has the environment of its parent, hence the variables that say which rank of which job
it is. If it called ``init()`` it would wait for ranks that have long met. `init` therefore leaves a
mark in the environment, and refuses where it finds another process's. `clean_environment`, which
users know as ``horovod.clean_environment``, is for programs that start a job of their own, or none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from horovod.common.environments import detect
from horovod.common.launcher_store import STORE_ADDRESS, STORE_PORT
from horovod.common.membership import WORKER_ID, is_elastic

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
    """The environment without what a launcher told this process about its place in a job.

    For programs that a rank starts and that are no part of its job:
    ``subprocess.run(command, env=horovod.clean_environment())``. Knobs stay as they are.

    Args:
        environ: The environment to clean; this process's if left out.

    Examples:
        >>> subprocess.run(["python", "other.py"], env=horovod.clean_environment())
    """
    return {name: value for name, value in environ.items() if not _OF_A_JOB.fullmatch(name)}


def mark_process(size: int, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """This process is a rank now: programs that it starts are not."""
    place = _place(environ)
    if size > 1 and place is not None:
        environ[MARK] = f"{os.getpid()} {place}"


def unmark_process(environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """It is not any more."""
    if environ.get(MARK, "").startswith(f"{os.getpid()} "):
        del environ[MARK]


def check_not_inherited(environ: Mapping[str, str] = os.environ) -> None:
    """`ValueError` if another process, which lives, is what our environment says that we are."""
    pid, _, place = environ.get(MARK, "").partition(" ")
    if not pid.isdecimal() or int(pid) == os.getpid() or place != _place(environ):
        return
    if not os.path.exists(f"/proc/{pid}"):
        return
    raise ValueError(
        f"{place.partition(' ')[0].replace('-', ' ')} of this job is process {pid} already, from "
        f"which this one (process {os.getpid()}) inherited its environment. A program that a rank "
        f"starts is no rank: let it do without init(), or start it without what the launcher told "
        f"the rank, for example with subprocess.run(..., env=horovod.clean_environment()) or "
        f"'env -u HOROVOD_RANK -u HOROVOD_SIZE ...'. Then it is alone, or can start a job of its "
        f"own with horovodrun or horovod.run"
    )


def _place(environ: Mapping[str, str]) -> str | None:
    """Which rank (or elastic worker) of which job the environment tells of, if it makes sense."""
    store = f"{environ.get(STORE_ADDRESS)}:{environ.get(STORE_PORT)}"
    if is_elastic(environ):
        return f"worker-{environ[WORKER_ID]} {store}"
    try:
        environment = detect(environ)
        return f"rank-{environment.claim()[0]} {environment.job_id() or store}"
    except ValueError:
        return None  # who was given a communicator needs no variables
