"""Handing a job over to mpirun or jsrun, for `mpi_run` and `js_run`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from horovod.runner.common.util.settings import BaseSettings, as_arguments, options_of
from horovod.runner.jobs import controllers
from horovod.runner.jobs.request import make_request
from horovod.runner.output.report import LaunchError


def run_elsewhere(
    controller: str,
    settings: BaseSettings,
    nics: Collection[str] | None,
    env: Mapping[str, str],
    command: str | Sequence[str],
) -> None:
    """Become the launcher's command; or run it, with a RuntimeError if it fails."""
    options = options_of([*as_arguments(settings, nics), f"--{controller}"], command, env)
    try:
        request = make_request(options, options.command, env)
        plan = controllers.plan(controller, options, request)
        if not settings.run_func_mode:
            controllers.replace_us(plan)
        status = controllers.run_and_wait(plan)
    except LaunchError as error:
        raise RuntimeError(str(error)) from None
    if status != 0:
        program = "mpirun" if controller == controllers.MPI else "jsrun"
        raise RuntimeError(f"{program} failed with exit code {status}")
