"""What programs take from upstream's `horovod.runner.launch` besides `parse_args`.

`horovod.runner.launch` and `horovod.runner` offer these names. Jobs described with upstream's
`_HorovodArgs` become options of horovodrun, and run as those of horovodrun and `horovod.run` do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from horovod.common.util import gloo_built, mpi_built
from horovod.runner._upstream.launchers import run_here
from horovod.runner.check_build import check_build as build_report
from horovod.runner.jobs import controllers
from horovod.runner.jobs.request import make_request
from horovod.runner.options.arguments import make_options
from horovod.runner.options.tunables import TUNABLES
from horovod.runner.output.report import LaunchError

_VALUES = {
    "num_proc": "-np",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "host_discovery_script": "--host-discovery-script",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "output_filename": "--output-filename",
    "mpi_args": "--mpi-args",
    "binding_args": "--binding-args",
    "config_file": "--config-file",
}
_SWITCHES = {
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "use_jsrun": "--jsrun",
    "disable_cache": "--disable-cache",
    "tcp_flag": "--tcp",
    "prefix_output_with_timestamp": "--prefix-output-with-timestamp",
}
_OTHERS = (
    "check_build",
    "command",
    "cooldown_range",
    "executable",
    "log_with_timestamp",
    "nics",
    "run_func",
    "verbose",
)


class _HorovodArgs:
    """A job, described by attributes: what is None is not given.

    The names are those of horovodrun's options. `command` is a list of words; `run_func`, a
    function without arguments, is called instead where it is given.
    """

    def __init__(self) -> None:
        for name in (*_VALUES, *_SWITCHES, *_OTHERS, *(row.dest for row in TUNABLES)):
            setattr(self, name, None)
        self.num_proc: int | None = 1
        self.prefix_output_with_timestamp = False


def is_gloo_used(
    use_gloo: bool | None = None, use_mpi: bool | None = None, use_jsrun: bool | None = None
) -> bool:
    """Whether `run_controller` would call its `gloo_run`."""
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
    """Call the one of three functions that starts jobs in the way asked for, or fit for here.

    Where nothing is asked for, jobs start without MPI, except in an LSF job with jsrun.
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

    What the ranks returned where it has a `run_func`; otherwise None. RuntimeError if it fails.
    With mpirun or jsrun and a command, this process becomes that program.
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
        return None
    try:
        request = make_request(options, options.command, os.environ)
        controllers.replace_process(controllers.make_plan(controller, options, request))
    except LaunchError as error:
        raise RuntimeError(str(error)) from None


def _run_elastic(args: Any) -> list[Any] | None:
    """The same for a job that must be elastic."""
    if getattr(args, "min_num_proc", None) is None and not args.host_discovery_script:
        raise ValueError(
            "this job is not elastic: give min_num_proc (--min-np) or host_discovery_script"
        )
    return _run(args)


def _controller(use_gloo: bool | None, use_mpi: bool | None, use_jsrun: bool | None) -> str:
    """As `controllers.choose` does, for a job whose hosts are not known here."""
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
    given = {name: value for name, value in vars(args).items() if value is not None}
    argv = [f"{flag}={given[name]}" for name, flag in _VALUES.items() if name in given]
    argv += [flag for name, flag in _SWITCHES.items() if given.get(name)]
    if "log_with_timestamp" in given:
        given["log_without_timestamp"] = not given["log_with_timestamp"]
    for row in TUNABLES:
        if row.dest not in given:
            continue
        value = given[row.dest]
        if row.opposite:
            argv.append(row.flag if value else row.opposite)
        else:
            argv.append(f"{row.flag}={value}")
    if given.get("nics"):
        argv.append(f"--network-interfaces={','.join(sorted(given['nics']))}")
    if "cooldown_range" in given:
        argv += ["--blacklist-cooldown-range", *map(str, given["cooldown_range"])]
    argv += ["--verbose"] * min(int(given.get("verbose", 0)), 2)
    if given.get("check_build"):
        argv.append("--check-build")
    command = _function_command(args) if "run_func" in given else list(given.get("command", ()))
    return make_options([*argv, "--", *command])


def _function_command(args: Any) -> list[str]:
    return [
        getattr(args, "executable", None) or sys.executable,
        "-m",
        "horovod.runner.functions.run_task",
    ]
