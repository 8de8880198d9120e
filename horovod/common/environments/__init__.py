"""Which launcher started this process?

`detect` looks at the environment and returns the one `Environment` that holds, in this order:

0. An elastic job's HOROVOD_WORKER_ID: its driver alone decides about places.
1. HOROVOD_*: explicit, so nothing else is asked.
2. torchrun's agent (TORCHELASTIC_RUN_ID): it may itself run once per node under srun or mpirun,
   whose variables then describe the agents and not this process.
3. MPI launchers, and RANK/WORLD_SIZE without an agent. Where several are there they must agree.
4. Slurm, in a job step. mpirun may run inside Slurm, so an MPI launcher that disagrees with it is
   believed; one that agrees was started by srun, which knows more about the hosts.
5. Nothing: a job of one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod, describe
from horovod.common.environments.elastic import Elastic
from horovod.common.environments.horovodrun import HorovodRun
from horovod.common.environments.hydra import Hydra
from horovod.common.environments.jsrun import JSRun
from horovod.common.environments.kubeflow import Kubeflow
from horovod.common.environments.mvapich2 import MVAPICH2
from horovod.common.environments.open_mpi import OpenMPI
from horovod.common.environments.pmix import PMIx
from horovod.common.environments.single import Single
from horovod.common.environments.slurm import Slurm
from horovod.common.environments.torchrun import TorchRun

__all__ = ["ENVIRONMENTS", "Elastic", "Environment", "RendezvousMethod", "detect"]

_MPI: tuple[type[Environment], ...] = (JSRun, OpenMPI, MVAPICH2, Hydra, PMIx)
_TORCH: tuple[type[Environment], ...] = (TorchRun, Kubeflow)

ENVIRONMENTS: tuple[type[Environment], ...] = (HorovodRun, *_MPI, *_TORCH, Slurm, Single)
"""Those that read a fixed place from variables, in the order in which they are asked."""


def detect(environ: Mapping[str, str] = os.environ) -> Environment:
    """The launcher that started this process; `ValueError` when the variables contradict."""
    if Elastic.detects(environ):
        return Elastic(environ)
    if HorovodRun.detects(environ):
        return HorovodRun(environ)
    torchrun = TorchRun(environ)
    if TorchRun.detects(environ) and torchrun.started_by_agent:
        return torchrun

    mpi = [kind(environ) for kind in _MPI if kind.detects(environ)]
    torch = [kind(environ) for kind in _TORCH if kind.detects(environ)]
    slurm = Slurm(environ) if Slurm.detects(environ) else None
    if (mpi or slurm) and not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        torch = []  # half of a pair is a left-over, not a launcher
    if len(mpi) > 1 and isinstance(mpi[-1], PMIx):
        mpi.pop()  # the launchers before it in the list pass PMIx's variables on
    _require_agreement([*mpi, *torch])

    if slurm is not None:
        if torch and isinstance(torch[0], Kubeflow) and not mpi:
            _require_agreement([slurm, *torch])
            return slurm
        agrees = not torch and all(found.claim() == slurm.claim() for found in mpi)
        if agrees and not any(isinstance(found, (JSRun, OpenMPI, MVAPICH2)) for found in mpi):
            return slurm
    return next(iter([*mpi, *torch]), None) or Single(environ)


def _require_agreement(found: list[Environment]) -> None:
    if len({environment.claim() for environment in found}) < 2:
        return
    told = "; ".join(
        f"{environment.name} says rank {environment.claim()[0]} of {environment.claim()[1]} "
        f"({describe(environment.environ, _names(environment))})"
        for environment in found
    )
    raise ValueError(
        f"cannot tell this process's rank, because launchers contradict each other: {told}. Unset "
        f"the variables of the launcher that did not start this job, or set HOROVOD_RANK, "
        f"HOROVOD_SIZE, HOROVOD_LOCAL_RANK and HOROVOD_LOCAL_SIZE yourself."
    )


def _names(environment: Environment) -> tuple[str, str]:
    return environment.variables.rank, environment.variables.size
