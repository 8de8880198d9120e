"""Choose what starts the processes of a job: horovodrun itself, mpirun or jsrun.

`launch` and `run_function` call `choose`. If another program starts the processes, they call
`make_plan`, and then `replace_process` or `run_and_wait`. Processes that mpirun or jsrun has
started learn their ranks from that program's variables (`horovod.common.environments`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from horovod.common.topology import Slot
from horovod.runner.agents.local_host import usable_cores
from horovod.runner.jobs.request import JobRequest
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import is_local
from horovod.runner.slots.worker_env import (
    interface_variables,
    memory_variables,
    slot_variables,
    threads_per_worker,
)

GLOO = "gloo"
MPI = "mpi"
JSRUN = "jsrun"

_KUBEFLOW_AGENT = "/etc/mpi/kubexec.sh"
"""The program that Kubeflow's first MPI operator has instead of ssh. It runs a command in another
pod, but does not pass on stdin, over which our agents get their orders; mpirun needs no stdin."""

_SLOT_VARIABLES = frozenset(slot_variables(Slot("", 0, 1, 0, 1, 0, 1)))


@dataclass(frozen=True)
class Plan:
    """A command that starts all ranks, with its environment."""

    command: list[str]
    env: Mapping[str, str]


def choose(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Choose the controller: the one that the options name, or the one that this machine needs.

    Returns:
        `GLOO` (horovodrun itself), `MPI` or `JSRUN`.
    """
    if options.use_mpi:
        return MPI
    if options.use_jsrun:
        return JSRUN
    if options.use_gloo or options.elastic:
        return GLOO
    if environ.get("LSB_JOBID") and shutil.which("jsrun", path=environ.get("PATH")):
        return JSRUN
    remote = any(not is_local(host.name) for host in options.hosts)
    return MPI if remote and environ.get("OMPI_MCA_plm_rsh_agent") == _KUBEFLOW_AGENT else GLOO


def make_plan(
    controller: str, options: argparse.Namespace, request: JobRequest, *, dry: bool = False
) -> Plan:
    """Make the command with which mpirun or jsrun starts a job.

    Args:
        controller: `MPI` or `JSRUN`.
        options: The options of horovodrun.
        request: The job.
        dry: Whether to start and write nothing while making the plan.

    Raises:
        LaunchError: If the program is missing, or cannot do what the options ask for.
    """
    # Imported late, because most jobs need neither.
    from horovod.runner.jobs.mpi_launch import jsrun_command, mpirun_command

    request = _with_defaults(request)
    if options.attach is not None:
        hint = f"; give mpirun --mpi-args='--stdin {options.attach}'" if controller == MPI else ""
        raise LaunchError(f"argument --attach: not possible with --{controller}{hint}", status=2)
    if options.output_ranks is not None:
        raise LaunchError(f"argument --output-ranks: not possible with --{controller}", status=2)
    if options.cpu_bind != "none":
        raise LaunchError(
            f"argument --cpu-bind: use --binding-args together with --{controller}", status=2
        )
    if options.output_filename and not dry:
        try:
            os.makedirs(options.output_filename, exist_ok=True)
        except OSError as error:
            path, why = options.output_filename, error.strerror
            problem = f"argument --output-filename: cannot write {path!r}: {why}"
            raise LaunchError(problem, status=2) from None
    if controller == MPI:
        return Plan(*mpirun_command(request, options))
    return Plan(jsrun_command(request, options, dry=dry), request.env)


def describe(plan: Plan) -> str:
    """Return a description of the plan for people."""
    lines = ["command:", f"  {shlex.join(plan.command)}", "", "variables set for it:"]
    changed = {name: value for name, value in plan.env.items() if os.environ.get(name) != value}
    lines += [f"  {name}={value}" for name, value in sorted(changed.items())]
    return "\n".join([*lines, "", "Nothing was started."])


def replace_process(plan: Plan) -> NoReturn:
    """Replace this process by the command: signals and the exit status are the command's then."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(plan.command[0], plan.command, dict(plan.env))
    except OSError as error:
        raise LaunchError(f"cannot run {plan.command[0]}: {error.strerror}", status=126) from None


def run_and_wait(plan: Plan) -> int:
    """Run the command to its end, and return its exit status, negative after a signal."""
    with subprocess.Popen(plan.command, env=dict(plan.env), stdin=subprocess.DEVNULL) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()  # mpirun then ends the ranks on all hosts
            process.wait()
            raise


def _with_defaults(request: JobRequest) -> JobRequest:
    # If this process is a rank of another job, its variables would mislead the ranks of this one.
    env = {name: value for name, value in request.env.items() if name not in _SLOT_VARIABLES}
    env |= {**interface_variables(list(request.nics)), "PYTHONUNBUFFERED": "1"}
    env |= memory_variables(os.uname().machine, env)  # hosts of an MPI job have one architecture
    if not env.get("OMP_NUM_THREADS") and request.all_local:
        # For local jobs only: the number of cores of another host is not known here.
        env["OMP_NUM_THREADS"] = str(threads_per_worker(usable_cores(), len(request.slots)))
    return replace(request, env=env)
