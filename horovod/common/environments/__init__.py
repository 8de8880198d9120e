"""Which launcher started this process?

`detect` looks at the variables and returns the first `Environment` of this list that applies:

0. An elastic job's HOROVOD_WORKER_ID: its driver alone decides about ranks.
1. HOROVOD_*: explicit, so nothing else is asked.
2. torchrun's agent (TORCHELASTIC_RUN_ID): it may itself run once per node under srun or mpirun,
   whose variables then describe the agents and not this process.
3. MPI launchers, and RANK/WORLD_SIZE without an agent. If there are several, they must agree.
4. Slurm, in a job step. mpirun may run inside Slurm, so an MPI launcher that disagrees with Slurm
   is believed. If the two agree, srun started the ranks, and it knows more about the hosts.
5. None of these: a job of one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod, Single, describe
from horovod.common.environments.horovodrun import Elastic, HorovodRun
from horovod.common.environments.mpi import MVAPICH2, Hydra, JSRun, OpenMPI, PMIx
from horovod.common.environments.slurm import Slurm
from horovod.common.environments.torchrun import Kubeflow, TorchRun

__all__ = ["ENVIRONMENTS", "Elastic", "Environment", "RendezvousMethod", "detect"]

_MPI: tuple[type[Environment], ...] = (JSRun, OpenMPI, MVAPICH2, Hydra, PMIx)
_TORCH: tuple[type[Environment], ...] = (TorchRun, Kubeflow)

ENVIRONMENTS: tuple[type[Environment], ...] = (HorovodRun, *_MPI, *_TORCH, Slurm, Single)
"""The environments that read fixed ranks from variables, in the order in which they are asked."""


def detect(environ: Mapping[str, str] = os.environ) -> Environment:
    """Return the launcher that started this process.

    Args:
        environ: The variables; by default those of this process.

    Raises:
        ValueError: The variables of several launchers contradict each other.
    """
    if Elastic.detects(environ):
        return Elastic(environ)
    if HorovodRun.detects(environ):
        return HorovodRun(environ)
    if TorchRun.detects(environ) and environ.get("TORCHELASTIC_RUN_ID"):
        return TorchRun(environ)

    mpi = [kind(environ) for kind in _MPI if kind.detects(environ)]
    torch = [kind(environ) for kind in _TORCH if kind.detects(environ)]
    slurm = Slurm(environ) if Slurm.detects(environ) else None
    if (mpi or slurm) and not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        torch = []  # one variable of the two is left over from something else
    if len(mpi) > 1 and isinstance(mpi[-1], PMIx):
        mpi.pop()  # the launchers before it in the list set PMIx's variables too
    _require_agreement([*mpi, *torch])

    if slurm is not None:
        if torch and isinstance(torch[0], Kubeflow) and not mpi:
            _require_agreement([slurm, *torch])
            return slurm
        agrees = not torch and all(launcher.claim() == slurm.claim() for launcher in mpi)
        if agrees and not any(isinstance(each, (JSRun, OpenMPI, MVAPICH2)) for each in mpi):
            return slurm
    return next(iter([*mpi, *torch]), None) or Single(environ)


def _require_agreement(environments: list[Environment]) -> None:
    """Raise ValueError if launchers claim different ranks for this process."""
    if len({environment.claim() for environment in environments}) < 2:
        return
    claims = []
    for environment in environments:
        rank, size = environment.claim()
        names = environment.variables.rank, environment.variables.size
        shown = describe(environment.environ, names)
        claims.append(f"{environment.name} says rank {rank} of {size} ({shown})")
    raise ValueError(
        f"cannot tell this process's rank, because launchers contradict each other: "
        f"{'; '.join(claims)}. Unset "
        f"the variables of the launcher that did not start this job, or set HOROVOD_RANK, "
        f"HOROVOD_SIZE, HOROVOD_LOCAL_RANK and HOROVOD_LOCAL_SIZE yourself."
    )
