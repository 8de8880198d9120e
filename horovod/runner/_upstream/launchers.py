"""Functions of Horovod 0.28.1 that start jobs, and names of its `horovod.runner.launch`.

`gloo_run`, `mpi_run` and `js_run` do what `horovodrun --gloo`, `--mpi` and `--jsrun` do. Jobs that
are described with upstream's `_HorovodArgs` become options of horovodrun, and run like those of
horovodrun and `horovod.run`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from horovod.common.util import gloo_built, mpi_built
from horovod.runner._upstream.settings import (
    SWITCHES,
    VALUES,
    BaseSettings,
    ElasticSettings,
    SlotInfo,
    attributes_of,
    options_of,
)
from horovod.runner.check_build import check_build as build_report
from horovod.runner.functions.function_call import with_known_sentence
from horovod.runner.jobs import controllers
from horovod.runner.jobs.mpi_launch import Mpi, find_mpi
from horovod.runner.jobs.request import make_request
from horovod.runner.jobs.run_job import run_job
from horovod.runner.options.tunables import TUNABLES
from horovod.runner.output.report import LaunchError, Outcome
from horovod.runner.slots.worker_env import interface_variables


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
    run_here(options_of({**attributes_of(settings, nics), "use_gloo": True}, command), env)


def gloo_run_elastic(
    settings: ElasticSettings,
    env: Mapping[str, str] | None,
    command: str | Sequence[str],
    executable: str | None = None,
) -> None:
    """Do the same as an elastic job, whose hosts come from `settings.discovery`."""
    options = options_of(attributes_of(settings), command)
    options.discovery = settings.discovery
    run_here(options, env)


def run_here(options: argparse.Namespace, env: Mapping[str, str] | None) -> None:
    """Run the job of these options to its end; raise RuntimeError if it fails."""
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
        raise RuntimeError(with_known_sentence(problem))


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
    options = options_of({**attributes_of(settings, nics), "use_mpi": True}, command, env)
    _run_elsewhere(controllers.MPI, options, env, settings.run_func_mode)


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
    env = os.environ if env is None else env
    options = options_of({**attributes_of(settings), "use_jsrun": True}, command, env)
    _run_elsewhere(controllers.JSRUN, options, env, settings.run_func_mode)


def _run_elsewhere(
    controller: str, options: argparse.Namespace, env: Mapping[str, str], waits: bool | None = False
) -> None:
    """Replace this process by mpirun or jsrun; or run it, and raise RuntimeError if it fails."""
    try:
        request = make_request(options, options.command, env)
        plan = controllers.make_plan(controller, options, request)
        if not waits:
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


_OTHERS = ("command", "executable", "log_with_timestamp", "nics", "run_func", "verbose")


class _HorovodArgs:
    """A job that is described by attributes; None means that an attribute is not given.

    The names are those of horovodrun's options. `command` is a list of words. If `run_func`, a
    function without arguments, is given, it is called instead.
    """

    def __init__(self) -> None:
        for name in (*VALUES, *SWITCHES, *_OTHERS, *(row.dest for row in TUNABLES)):
            setattr(self, name, None)
        self.num_proc: int | None = 1
        self.prefix_output_with_timestamp = False


def is_gloo_used(
    use_gloo: bool | None = None, use_mpi: bool | None = None, use_jsrun: bool | None = None
) -> bool:
    """Return whether `run_controller` would call its `gloo_run`."""
    return _controller(use_gloo, use_mpi, use_jsrun) == controllers.GLOO


def run_controller(
    use_gloo: bool | None,
    gloo_run: Callable[[], Any],
    use_mpi: bool | None,
    mpi_run: Callable[[], Any],
    use_jsrun: bool | None,
    js_run: Callable[[], Any],
    verbosity: int | None,
) -> None:
    """Call the one of three functions that starts jobs in the requested way.

    By default jobs start without MPI, except in an LSF job with jsrun.
    """
    controller = _controller(use_gloo, use_mpi, use_jsrun)
    verbose = verbosity is not None and verbosity >= 2
    if controller == controllers.GLOO:
        if not gloo_built(verbose):
            raise ValueError("--gloo needs PyTorch with Gloo: pip install 'horovod[pytorch]'")
        gloo_run()
        return
    if not mpi_built(verbose):
        raise ValueError(f"--{controller} needs mpi4py and an MPI library: pip install mpi4py")
    if controller == controllers.MPI:
        mpi_run()
    elif not os.environ.get("LSB_JOBID"):
        raise ValueError("--jsrun: this is no LSF job (LSB_JOBID is not set)")
    else:
        js_run()


def check_build(verbose: bool) -> NoReturn:
    """Print what is usable on this machine, and end the program."""
    print(build_report(verbose=verbose))
    sys.exit(0)


def _run(args: Any) -> list[Any] | None:
    """Run the job that `_HorovodArgs`, or the result of `parse_args`, describes.

    With mpirun or jsrun and a command, that program replaces this process.

    Returns:
        What the ranks returned if it has a `run_func`; otherwise None.

    Raises:
        RuntimeError: If the job fails.
    """
    options = _options(args)
    if options.check_build:
        check_build(verbose=bool(options.verbose))
    for notice in options.notices:
        warnings.warn(f"horovod: {notice}", stacklevel=2)
    function = getattr(args, "run_func", None)
    if function is not None:
        from horovod.runner.functions.run_function import call_function  # needs cloudpickle

        options.command = _function_command(args)
        return call_function(options, function, (), {})
    controller = controllers.choose(options, os.environ)
    if controller == controllers.GLOO:
        run_here(options, None)
    else:
        _run_elsewhere(controller, options, os.environ)
    return None


def _run_elastic(args: Any) -> list[Any] | None:
    """Run the job that `_HorovodArgs` describes, which must be elastic."""
    if getattr(args, "min_num_proc", None) is None and not args.host_discovery_script:
        raise ValueError(
            "this job is not elastic: give min_num_proc (--min-np) or host_discovery_script"
        )
    return _run(args)


def _controller(use_gloo: bool | None, use_mpi: bool | None, use_jsrun: bool | None) -> str:
    """Choose like `controllers.choose`, for a job whose hosts are not known here."""
    if use_gloo:
        return controllers.GLOO
    if use_mpi:
        return controllers.MPI
    if use_jsrun or (os.environ.get("LSB_JOBID") and shutil.which("jsrun")):
        return controllers.JSRUN
    return controllers.GLOO


def _options(args: Any) -> argparse.Namespace:
    if isinstance(args, argparse.Namespace) and hasattr(args, "notices"):
        return args  # from `parse_args`
    given = {"nics": None, "verbose": 0, **vars(args)}
    if given.get("log_with_timestamp") is not None:
        given["log_without_timestamp"] = not given["log_with_timestamp"]
    given |= {"nics": sorted(given["nics"] or ()), "verbose": min(int(given["verbose"] or 0), 2)}
    if given.get("run_func") is not None:
        return options_of(given, _function_command(args))
    return options_of(given, given.get("command") or ())


def _function_command(args: Any) -> list[str]:
    python = getattr(args, "executable", None) or sys.executable
    return [python, "-m", "horovod.runner.functions.run_task"]
