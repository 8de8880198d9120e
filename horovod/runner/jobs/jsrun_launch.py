"""``horovodrun --jsrun``: the ``jsrun`` command line that starts the ranks of an LSF job.

`controllers` calls it. Where each rank runs is told by an explicit resource file (ERF): one line
a rank, with the hardware threads that it may use. They are split evenly over the GPUs of a host,
one rank for each GPU, or over the ranks where there is no GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from horovod.runner.jobs.mpi_launch import MpiJob, split
from horovod.runner.jobs.request import JobRequest
from horovod.runner.output.report import LaunchError

_PROBE_SECONDS = 60
_PROBE = (
    "import os; gpus = os.environ.get('CUDA_VISIBLE_DEVICES', ''); "
    "print('shape', len(os.sched_getaffinity(0)), len([g for g in gpus.split(',') if g]))"
)


@dataclass(frozen=True)
class Shape:
    """What a host of the allocation offers to one job; all hosts are alike."""

    threads: int
    gpus: int


def ask_shape(jsrun: str, environ: Mapping[str, str]) -> Shape:
    """Have jsrun look at one host: threads, and GPUs by what it makes visible."""
    command = [jsrun, "--nrs", "1", "--rs_per_host", "1", "--tasks_per_rs", "1"]
    command += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--bind", "none"]
    try:
        done = subprocess.run(
            [*command, sys.executable, "-c", _PROBE],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"cannot ask jsrun what a host offers: {error}") from None
    found = re.search(r"shape (\d+) (\d+)", done.stdout)
    if found is None:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LaunchError(f"cannot ask jsrun what a host offers: {said}")
    return Shape(int(found[1]), int(found[2]))


def rankfile(request: JobRequest, shape: Shape) -> str:
    """The resource file; `LaunchError` where a host has no room for its ranks."""
    lines = ["overlapping_rs: allow", "cpu_index_using: logical", ""]
    for name, slots in request.hosts.items():
        room = shape.gpus or shape.threads
        if len(slots) > room:
            what = "GPUs" if shape.gpus else "hardware threads"
            raise LaunchError(
                f"{len(slots)} processes are to run on {name}, but a host here has {room} {what}; "
                f"choose fewer slots with -H",
                status=2,
            )
        share = max(1, shape.threads // (shape.gpus or len(slots)))
        for slot in slots:
            first = slot.local_rank * share
            place = f"hostname: {name}; cpu: {{{first}-{first + share - 1}}}; gpu: *; mem: *"
            lines.append(f"rank: {slot.rank}: {{ {place} }}")
    return "\n".join(lines) + "\n"


def make_rankfile(jsrun: str, request: JobRequest) -> str:
    """Its path. It stays: jsrun reads it when this program is already gone."""
    content = rankfile(request, ask_shape(jsrun, request.env))
    descriptor, path = tempfile.mkstemp(prefix="horovod-", suffix=".erf")
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
    return path


def jsrun_command(path: str, job: MpiJob, erf: str) -> list[str]:
    """The whole command; jsrun passes the environment on by itself."""
    command = [path, "--erf_input", erf]
    if job.output_filename:
        for stream in ("stdout", "stderr"):
            command += [f"--stdio_{stream}", os.path.join(job.output_filename, stream)]
    arguments = " ".join(filter(None, ["-tcp" if job.tcp else "", job.mpi_args or ""]))
    if arguments:
        command += ["--smpiargs", arguments]
    return [*command, *split("--binding-args", job.binding_args), *job.request.command]
