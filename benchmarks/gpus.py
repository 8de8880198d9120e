"""The GPUs of this machine, and what ranks need that share one: for benchmarks on `--device cuda`.

NCCL refuses two ranks with the same host and bus id, and takes the host from NCCL_HOSTID where that
is set: ranks with a NCCL_HOSTID of their own may share a GPU. Their bytes then go over sockets, for
every contender alike. MPS, a daemon of the driver's, lets their kernels run side by side; without
it they take turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

MPS_CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PATIENCE = 20.0  # seconds for each command to the driver


@dataclass(frozen=True)
class Gpus:
    """The GPUs that ranks run on; `Gpus()` where they run on CPUs."""

    name: str = ""
    count: int = 0
    mps: Mapping[str, str] = field(default_factory=dict)  # variables by which ranks find MPS

    def are_shared(self, size: int) -> bool:
        """Whether `size` ranks have to share them."""
        return 0 < self.count < size

    def variables(self, rank: int, size: int) -> dict[str, str]:
        """What rank `rank` of `size` needs beside what a launcher tells it."""
        if not self.are_shared(size):
            return {}
        return {**own_nccl_host(f"rank{rank}"), **self.mps}


def own_nccl_host(name: str) -> dict[str, str]:
    """Variables by which NCCL takes a rank for the only one on the host of that name."""
    return {
        "NCCL_HOSTID": name,
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }


def add_mps_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-mps",
        action="store_true",
        help=f"do not start {MPS_CONTROL} where ranks share a GPU: their kernels then take turns",
    )


@contextmanager
def gpus_for(device: str, most_ranks: int, with_mps: bool) -> Iterator[Gpus]:
    """Say in a line which GPUs there are and how ranks share them, with MPS while the block runs.

    Args:
        device: What ranks compute on; where that is not "cuda" there is nothing to do or to say.
        most_ranks: Most ranks of one job.
        with_mps: Whether to start MPS for ranks that share a GPU.
    """
    if device != "cuda":
        yield Gpus()
        return
    import torch

    count = torch.cuda.device_count()  # asks the driver's library, and so makes no context here
    if not count:
        sys.exit("--device cuda: torch finds no GPU on this machine")
    found = Gpus(gpu_name(), count)
    told = f"{count} x {found.name}, up to {most_ranks} ranks"
    if not found.are_shared(most_ranks):
        print(f"{told}: a GPU each", flush=True)
        yield found
        return
    told += ": they share, each with a NCCL_HOSTID of its own, NCCL over sockets"
    told += f" ({own_nccl_host('')['NCCL_SOCKET_IFNAME']})"
    with mps() if with_mps else no_mps() as (variables, note):
        print(f"{told}; {note}", flush=True)
        yield Gpus(found.name, count, variables)


def gpu_name() -> str:
    """As the driver calls the first GPU; without a context on it, as torch would make."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True
        )
        return told.stdout.partition("\n")[0].strip()
    return "unknown GPU"


# -- MPS ---------------------------------------------------------------------------------------


@contextmanager
def no_mps() -> Iterator[tuple[dict[str, str], str]]:
    """Start no MPS: the variables for ranks, none, and what to tell people."""
    usual = Path(os.environ.get(PIPES, "/tmp/nvidia-mps"))
    if (usual / "control").exists():
        yield {}, f"somebody's MPS runs ({usual}), which ranks will use"
    else:
        yield {}, "no MPS, as asked: kernels of different ranks take turns"


@contextmanager
def mps() -> Iterator[tuple[dict[str, str], str]]:
    """Run an MPS daemon of our own: the variables for ranks, and what to tell people.

    One that runs already, which CUDA_MPS_PIPE_DIRECTORY says, is left alone and used.
    """
    program = shutil.which(MPS_CONTROL)
    if PIPES in os.environ:
        yield {}, f"the MPS at {PIPES}={os.environ[PIPES]}"
        return
    if program is None:
        yield (
            {},
            f"no MPS, because there is no {MPS_CONTROL}: kernels of different ranks take turns",
        )
        return
    # A short path: it holds sockets.
    with tempfile.TemporaryDirectory(prefix="hvd-mps-", ignore_cleanup_errors=True) as folder:
        pipes, logs = Path(folder, "pipe"), Path(folder, "log")
        pipes.mkdir()
        logs.mkdir()
        variables = {PIPES: str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        problem = _command([program, "-d"], "", variables, Path(folder, "start"))
        if problem:
            yield {}, f"no MPS, because it does not start ({problem}): kernels take turns"
            return
        try:
            yield variables, "MPS started"
        finally:
            _stop(program, variables, pipes, Path(folder, "stop"))


def _stop(program: str, variables: Mapping[str, str], pipes: Path, output: Path) -> None:
    """End our daemon: as it wants to be ended, or else by a signal."""
    control = _daemon(pipes)
    # With a limit for clients that have not ended, which an old daemon may not understand.
    for order in ("quit -t 5", "quit"):
        problem = _command([program], f"{order}\n", variables, output)
        if not problem and not _runs(control):
            return
    if control is not None and _runs(control):
        with suppress(ProcessLookupError):
            os.kill(control, signal.SIGTERM)


def _daemon(pipes: Path) -> int | None:
    """The daemon's process, which it has noted itself."""
    with suppress(OSError, ValueError):
        return int((pipes / f"{MPS_CONTROL}.pid").read_text())
    return None


def _runs(pid: int | None) -> bool:
    """Whether that process has still not ended after a second; zombies have."""
    for _ in range(20):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)  # between looks at a process
    return True


def _command(
    command: list[str], order: str, variables: Mapping[str, str], output: Path
) -> str | None:
    """Run it; why it failed, or None.

    What it prints goes to a file: a daemon would keep a pipe open for as long as it lives.
    """
    with output.open("w") as sink:
        try:
            done = subprocess.run(
                command,
                input=order,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    if done.returncode:
        return output.read_text().strip() or f"status {done.returncode}"
    return None
