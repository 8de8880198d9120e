"""Handing a job over to mpirun or jsrun, for `mpi_run` and `js_run`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from horovod.runner.common.util.settings import BaseSettings
from horovod.runner.jobs import controllers
from horovod.runner.jobs.request import make_request
from horovod.runner.options.arguments import make_options
from horovod.runner.output.report import LaunchError


def run_elsewhere(
    controller: str,
    settings: BaseSettings,
    arguments: Sequence[str],
    env: Mapping[str, str],
    command: str | Sequence[str],
) -> None:
    """Become the launcher's command; or run it, with a RuntimeError if it fails."""
    words = shlex.split(command) if isinstance(command, str) else list(command)
    options = make_options([*arguments, "--", *words], env)
    try:
        plan = controllers.plan(controller, options, make_request(options, words, env))
        if not settings.run_func_mode:
            controllers.replace_us(plan)
        status = controllers.run_and_wait(plan)
    except LaunchError as error:
        raise RuntimeError(str(error)) from None
    if status != 0:
        program = "mpirun" if controller == controllers.MPI else "jsrun"
        raise RuntimeError(f"{program} failed with exit code {status}")
