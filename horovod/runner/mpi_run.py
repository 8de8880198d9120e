"""Jobs started by mpirun, for programs that call upstream's launcher: `horovodrun --mpi`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from horovod.runner.common.util.settings import BaseSettings
from horovod.runner.foreign_run import run_elsewhere
from horovod.runner.jobs import controllers
from horovod.runner.jobs.mpi_launch import Mpi, find_mpi
from horovod.runner.output.report import LaunchError


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Whether there is an mpirun that we know."""
    return _kind(env) is not None


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    return _kind(env) is Mpi.OPEN_MPI


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    return _kind(env) is Mpi.SPECTRUM


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    return _kind(env) is Mpi.MPICH


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    return _kind(env) is Mpi.INTEL


def mpi_run(
    settings: BaseSettings,
    nics: Collection[str] | None,
    env: Mapping[str, str],
    command: str | Sequence[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Run a command with mpirun. Unless `settings.run_func_mode`, this process becomes mpirun."""
    if not isinstance(env, Mapping):
        raise Exception(f"env argument must be a dict, not {type(env).__name__}")
    run_elsewhere(controllers.MPI, settings, nics, env, command)


def _kind(env: Mapping[str, str] | None) -> Mpi | None:
    try:
        return find_mpi(os.environ if env is None else env)[1]
    except LaunchError:
        return None
