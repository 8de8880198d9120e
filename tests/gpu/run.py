"""Runs all tests that want a GPU, for `make test-gpu`:

    python -m tests.gpu.run [--no-mps] [--streams N] [arguments for pytest]

First everything but the tests marked `killing`, under an MPS daemon of its own where the program is
installed: it lets the kernels of ranks that share a GPU run side by side, where they would take
turns of milliseconds. Then the killing tests, without it: a client that dies may take others along.

Under MPS, a machine with many cores works on several test files at once, in N streams (one for each
5 cores, 3 at most). The output of a file is printed when it has ended.

Needs pytest and hypothesis, and no other plugin; frameworks that are missing are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
MPS = "nvidia-cuda-mps-control"
LIMIT = 900.0  # seconds for all tests of a part: without a peer, kernels spin forever
NO_TESTS = 5  # pytest's exit code where none was chosen
CORES_OF_STREAM = 5  # four ranks and pytest
MOST_STREAMS = 3
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
    parser = argparse.ArgumentParser(prog="tests.gpu.run", allow_abbrev=False)
    parser.add_argument("--no-mps", action="store_true", help="kernels of ranks take turns")
    streams = max(1, min(MOST_STREAMS, (os.cpu_count() or 1) // CORES_OF_STREAM))
    parser.add_argument("--streams", type=int, default=streams, help="files at once under MPS")
    options, arguments = parser.parse_known_args(arguments)
    missing = _missing(("pytest", "hypothesis", "cloudpickle"))
    if missing:
        print(f"test-gpu: {sys.executable} has no {', '.join(missing)}", file=sys.stderr)
        return 2
    machine = _machine()
    if machine is None:
        print("test-gpu: torch finds no GPU here, so nothing would be tested", file=sys.stderr)
        return 2
    print(f"test-gpu: {machine}", flush=True)
    lines: list[str] = []
    with _mps_daemon(not options.no_mps) as (environment, how):
        first = Part("not killing", how, environment, arguments)
        passed = first.run(_paths(), options.streams if environment else 1, lines)
    second = Part("killing", "without MPS", {}, arguments)
    passed = second.run(["tests/gpu"], 1, lines) and passed
    print("\n".join([f"test-gpu: {machine}", *lines]))
    return 0 if passed else 1


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
    """The files of the GPUs' folder, and the tests of devices of all bindings that are here."""
    found = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/gpu/test_*.py"))]
    for path in sorted(ROOT.glob("tests/*/test_*devices.py")):
        missing = _missing(NEEDED.get(path.parent.name, ()))
        if missing:
            print(f"test-gpu: without {path.relative_to(ROOT)}: no {', '.join(missing)}")
        else:
            found.append(str(path.relative_to(ROOT)))
    return found


class Part:
    """The tests of a marker, run by pytest in one or several processes.

    Args:
        marker: Which tests, for pytest's `-m`.
        how: A word on it, for the line at the end.
        environment: Variables for pytest, beside those of this process.
        arguments: More arguments for pytest.
    """

    def __init__(
        self, marker: str, how: str, environment: dict[str, str], arguments: list[str]
    ) -> None:
        self._name = f"{marker}, {how}"
        self._environment = {**os.environ, **environment, **_FRUGAL}
        self._command = [sys.executable, "-m", "pytest", "-m", marker, *arguments]
        if _missing(("pytest_timeout",)):  # which has the option `timeout` of pyproject.toml
            self._command += ["-W", "ignore:Unknown config option:pytest.PytestConfigWarning"]
        self._ends = 0.0

    def run(self, paths: list[str], streams: int, lines: list[str]) -> bool:
        """Run the tests of `paths` and add a line to `lines`; returns whether all passed."""
        began = time.monotonic()
        self._ends = began + LIMIT
        if streams == 1:
            verdicts = [self._pytest(paths, None)]
        else:
            with ThreadPoolExecutor(streams) as pool:
                verdicts = list(pool.map(self._captured, paths))
        bad = [verdict for verdict in verdicts if verdict not in ("passed", "no tests")]
        verdict = "; ".join(bad) if bad else "passed" if "passed" in verdicts else "no tests"
        seconds = time.monotonic() - began
        lines.append(f"test-gpu: {self._name}: {verdict} ({seconds:.0f} s)")
        return not bad

    def _captured(self, path: str) -> str:
        """Run the tests of a file, and print what they said in one piece."""
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            verdict = self._pytest([path], output)
            output.seek(0)
            said = output.read()
        seconds = time.monotonic() - began
        print(f"{said}test-gpu: {path}: {verdict} ({seconds:.0f} s)", flush=True)
        return verdict if verdict in ("passed", "no tests") else f"{path} {verdict}"

    def _pytest(self, paths: list[str], output: IO[str] | None) -> str:
        try:
            done = subprocess.run(
                [*self._command, *paths],
                cwd=ROOT,
                env=self._environment,
                stdout=output,
                stderr=output,
                timeout=max(1.0, self._ends - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"NOT ENDED in {LIMIT:.0f} s"
        return {0: "passed", NO_TESTS: "no tests"}.get(done.returncode, "FAILED")


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
