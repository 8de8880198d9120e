"""Jobs without MPI, for programs that call upstream's launcher: `horovodrun --gloo`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from horovod.runner.common.unavailable import RENDEZVOUS, unavailable
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.common.util.settings import BaseSettings, as_arguments, options_of
from horovod.runner.elastic.settings import ElasticSettings, as_elastic_arguments
from horovod.runner.functions.remote_error import told_by_upstream
from horovod.runner.jobs.run_job import run_job
from horovod.runner.output.report import LaunchError, Outcome
from horovod.runner.slots.worker_env import interface_variables


def create_slot_env_vars(slot_info: SlotInfo) -> dict[str, str]:
    """The variables that tell a worker its place."""
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slot_info).items()}


def create_run_env_vars(
    server_ip: str, nics: Collection[str], port: int, elastic: bool = False
) -> dict[str, str]:
    """The variables that are the same for all workers. A job also has a key, which is not here."""
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
    """The same as an elastic job, whose hosts come from `settings.discovery`."""
    options = options_of(as_elastic_arguments(settings), command)
    options.discovery = settings.discovery
    run_here(options, env)


def launch_gloo(
    command: str | Sequence[str],
    exec_command: Callable[..., Any],
    settings: BaseSettings,
    nics: Collection[str] | None,
    env: Mapping[str, str] | None,
    server_ip: str | None,
) -> None:
    """Not offered: workers that somebody else starts would meet without authentication."""
    raise unavailable("launch_gloo", *RENDEZVOUS)


def launch_gloo_elastic(*arguments: Any, **named: Any) -> None:
    """Not offered: workers that somebody else starts would meet without authentication."""
    raise unavailable("launch_gloo_elastic", *RENDEZVOUS)


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
