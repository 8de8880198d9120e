"""Runs all tests that want a GPU, for `make test-gpu`:

    python -m tests.gpu.run [--no-mps] [arguments for pytest]

First everything but the tests marked `killing`, under an MPS daemon of its own where the program is
installed: it lets the kernels of ranks that share a GPU run side by side, where they would take
turns of milliseconds. Then the killing tests, without it: a client that dies may take others along.

Needs pytest and hypothesis, and no other plugin; frameworks that are missing are left out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MPS = "nvidia-cuda-mps-control"
LIMIT = 900.0  # seconds for all tests of a part: without a peer, kernels spin forever
NO_TESTS = 5  # pytest's exit code where none was chosen
# JAX takes three quarters of a GPU for itself unless told otherwise: other tests' ranks need some.
_FRUGAL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# What the tests of these folders import.
NEEDED = {
    "jax": ("jax", "optax", "flax"),
    "keras": ("keras", "tensorflow"),
    "lightning": ("lightning",),
    "tensorflow": ("tensorflow",),
}


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    missing = _missing(("pytest", "hypothesis", "cloudpickle"))
    if missing:
        print(f"test-gpu: {sys.executable} has no {', '.join(missing)}", file=sys.stderr)
        return 2
    machine = _machine()
    if machine is None:
        print("test-gpu: torch finds no GPU here, so nothing would be tested", file=sys.stderr)
        return 2
    wants_mps = "--no-mps" not in arguments
    arguments = [argument for argument in arguments if argument != "--no-mps"]
    print(f"test-gpu: {machine}", flush=True)
    lines: list[str] = []
    with _mps_daemon(wants_mps) as (environment, how):
        first = _run("not killing", how, environment, [*_paths(), *arguments], lines)
    second = _run("killing", "without MPS", {}, ["tests/gpu", *arguments], lines)
    print("\n".join([f"test-gpu: {machine}", *lines]))
    return max(first, second)


def _machine() -> str | None:
    """What the tests run on, for people; None where there is nothing."""
    import torch

    from tests.accelerators import gpu_count, on_cpu

    if on_cpu():
        return f"tensors in host memory, torch {torch.__version__}"
    count = gpu_count()
    if not count:
        return None
    names = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    name = names[0] if names else "GPU"
    return f"{count} x {name}, torch {torch.__version__}, NCCL {version}"


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def _paths() -> list[str]:
    """The folder of the GPUs, and the tests of devices of all bindings that can be imported."""
    found = ["tests/gpu"]
    for path in sorted(ROOT.glob("tests/*/test_*devices.py")):
        missing = _missing(NEEDED.get(path.parent.name, ()))
        if missing:
            print(f"test-gpu: without {path.relative_to(ROOT)}: no {', '.join(missing)}")
        else:
            found.append(str(path.relative_to(ROOT)))
    return found


def _run(
    marker: str, how: str, environment: dict[str, str], arguments: list[str], lines: list[str]
) -> int:
    """Run pytest on the tests of a marker; add a line about it to `lines`."""
    command = [sys.executable, "-m", "pytest", "-m", marker]
    if _missing(("pytest_timeout",)):  # which has the option `timeout` of pyproject.toml
        command += ["-W", "ignore:Unknown config option:pytest.PytestConfigWarning"]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            env={**os.environ, **environment, **_FRUGAL},
            timeout=LIMIT,
            check=False,
        )
        code, verdict = done.returncode, "passed" if done.returncode == 0 else "FAILED"
    except subprocess.TimeoutExpired:
        code, verdict = 1, f"NOT ENDED in {LIMIT:.0f} s"
    if code == NO_TESTS:
        code, verdict = 0, "no tests"
    seconds = time.monotonic() - began
    lines.append(f"test-gpu: {marker}, {how}: {verdict} ({seconds:.0f} s)")
    return code


# -- MPS ----------------------------------------------------------------------------------------


@contextmanager
def _mps_daemon(wanted: bool) -> Iterator[tuple[dict[str, str], str]]:
    """Variables of processes under a daemon that ends with the block, and a word on it."""
    program = shutil.which(MPS) if wanted else None
    if program is None:
        yield {}, f"without MPS ({f'there is no {MPS}' if wanted else 'as asked for'})"
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        variables = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        for path in variables.values():
            os.mkdir(path)
        problem = _command(program, variables, ["-d"])
        if problem is not None:
            yield {}, f"without MPS, which did not start ({problem})"
            return
        try:
            yield variables, "under MPS"
        finally:
            _stop(program, variables)


def _command(
    program: str, variables: dict[str, str], arguments: list[str], text: str = ""
) -> str | None:
    """Run the daemon's program; returns what went wrong, if anything."""
    # Into a file: the daemon keeps its output open, and a pipe would never end.
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                [program, *arguments],
                env={**os.environ, **variables},
                input=text,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=30,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "no answer in 30 s"
        output.seek(0)
        said = output.read().strip()
    return None if done.returncode == 0 else said or f"exit code {done.returncode}"


def _stop(program: str, variables: dict[str, str]) -> None:
    problem = _command(program, variables, [], "quit\n")
    if problem is None:
        return
    note = Path(variables["CUDA_MPS_PIPE_DIRECTORY"], f"{MPS}.pid")
    print(f"test-gpu: MPS does not quit ({problem}): it is ended", file=sys.stderr)
    try:
        os.kill(int(note.read_text()), signal.SIGKILL)
    except (OSError, ValueError) as error:
        print(f"test-gpu: perhaps it is still there: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
