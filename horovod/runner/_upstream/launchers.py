"""Functions of Horovod 0.28.1 that start a job: by the launcher itself, by mpirun or by jsrun.

They do what `horovodrun --gloo`, `--mpi` and `--jsrun` do.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from horovod.runner._upstream.hosts import SlotInfo
from horovod.runner._upstream.refused import REFUSED, refuse
from horovod.runner._upstream.settings import (
    BaseSettings,
    ElasticSettings,
    as_arguments,
    as_elastic_arguments,
    options_of,
)
from horovod.runner.functions.remote_error import told_by_upstream
from horovod.runner.jobs import controllers
from horovod.runner.jobs.mpi_launch import Mpi, find_mpi
from horovod.runner.jobs.request import make_request
from horovod.runner.jobs.run_job import run_job
from horovod.runner.output.report import LaunchError, Outcome
from horovod.runner.slots.worker_env import interface_variables


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        return refuse(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def create_slot_env_vars(slot_info: SlotInfo) -> dict[str, str]:
    """Return the variables that tell a worker its rank, size and host."""
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slot_info).items()}


def create_run_env_vars(
    server_ip: str, nics: Collection[str], port: int, elastic: bool = False
) -> dict[str, str]:
    """Return the variables that are equal for all workers. A job's key is not among them."""
    env = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server_ip,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "PYTHONUNBUFFERED": "1",
    }
    env |= interface_variables(list(nics))
    return {**env, "HOROVOD_ELASTIC": "1"} if elastic else env


def gloo_run(
    settings: BaseSettings,
    nics: Collection[str] | None,
    env: Mapping[str, str] | None,
    server_ip: str | None,
    command: str | Sequence[str],
) -> None:
    """Run a command on all ranks of a job to its end; RuntimeError if one fails.

    `server_ip` is not needed: each host finds the way to the launcher by itself.
    """
    run_here(options_of([*as_arguments(settings, nics), "--gloo"], command), env)


def gloo_run_elastic(
    settings: ElasticSettings,
    env: Mapping[str, str] | None,
    command: str | Sequence[str],
    executable: str | None = None,
) -> None:
    """Do the same as an elastic job, whose hosts come from `settings.discovery`."""
    options = options_of(as_elastic_arguments(settings), command)
    options.discovery = settings.discovery
    run_here(options, env)


def run_here(options: argparse.Namespace, env: Mapping[str, str] | None) -> None:
    """Run the job of these options to its end; RuntimeError if it fails."""
    try:
        outcome = run_job(options, options.command, env=os.environ if env is None else env)
    except LaunchError as error:
        raise RuntimeError(str(error)) from None
    _raise_failure(outcome)


def _raise_failure(outcome: Outcome) -> None:
    problem = (outcome.problem or outcome.account).strip()
    if outcome.interrupted is not None:
        problem = problem or f"the job was ended by signal {outcome.interrupted}"
    if problem or outcome.first_failure is not None:
        raise RuntimeError(told_by_upstream(problem))


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Return whether there is an mpirun that we know."""
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
        raise TypeError(f"env argument must be a dict, not {type(env).__name__}")
    _run_elsewhere(controllers.MPI, settings, nics, env, command)


def is_jsrun_installed() -> bool:
    return shutil.which("jsrun") is not None


def js_run(
    settings: BaseSettings,
    nics: Collection[str] | None,
    env: Mapping[str, str] | None,
    command: str | Sequence[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Run a command with jsrun. Unless `settings.run_func_mode`, this process becomes jsrun."""
    _run_elsewhere(controllers.JSRUN, settings, None, os.environ if env is None else env, command)


def _run_elsewhere(
    controller: str,
    settings: BaseSettings,
    nics: Collection[str] | None,
    env: Mapping[str, str],
    command: str | Sequence[str],
) -> None:
    """Become the command of mpirun or jsrun; or run it, with a RuntimeError if it fails."""
    options = options_of([*as_arguments(settings, nics), f"--{controller}"], command, env)
    try:
        request = make_request(options, options.command, env)
        plan = controllers.make_plan(controller, options, request)
        if not settings.run_func_mode:
            controllers.replace_process(plan)
        status = controllers.run_and_wait(plan)
    except LaunchError as error:
        raise RuntimeError(str(error)) from None
    if status != 0:
        program = "mpirun" if controller == controllers.MPI else "jsrun"
        raise RuntimeError(f"{program} failed with exit code {status}")


def _kind(env: Mapping[str, str] | None) -> Mpi | None:
    try:
        return find_mpi(os.environ if env is None else env)[1]
    except LaunchError:
        return None
