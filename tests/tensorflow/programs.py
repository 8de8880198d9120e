"""Running an example on two ranks, and comparing what they ended with.

`run_in_ranks` forks the ranks from a server that has TensorFlow loaded, which saves most of the
time; `run_under_horovodrun` starts them as a user does. Run as a program, this module runs one
script and then prints what it trained.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import clean_environment, run_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HANG = 280.0  # seconds; no example that is cut short takes a tenth of it
_PATIENT = {"HOROVOD_START_TIMEOUT": "200"}  # one rank may import a minute longer than the other


def run_in_ranks(
    script: str, *options: str | Path, cwd: Path, env: dict[str, str] | None = None
) -> tuple[str, str]:
    """What rank 0 of two prints, and the checksum of the variables that both end with."""
    arguments = [str(EXAMPLES / script), *map(str, options)]
    outcomes = run_ranks(_run_in_rank, 2, arguments, str(cwd), env=env, timeout=HANG)
    (output, first), (other_output, second) = outcomes
    assert other_output == "", "rank 0 alone should speak"
    assert first == second, f"the ranks ended with different variables\n{output}"
    return output, first


def run_under_horovodrun(
    script: str, *options: str | Path, cwd: Path, env: dict[str, str] | None = None
) -> tuple[str, str]:
    """The same with fresh processes."""
    program = [sys.executable, "-m", "tests.tensorflow.programs", str(EXAMPLES / script)]
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner", "-np", "2", *program, *map(str, options)],
        env=clean_environment() | _PATIENT | {"PYTHONPATH": str(ROOT)} | (env or {}),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^\[(\d)\]<stdout>:checksum (\w+)$", done.stdout, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == ["0", "1"], done.stdout + done.stderr
    assert found[0][1] == found[1][1], f"the ranks ended with different variables\n{done.stdout}"
    lines = [line for line in done.stdout.splitlines() if ">:checksum" not in line]
    assert all(line.startswith("[0]<stdout>:") for line in lines), "rank 0 alone should speak"
    return "\n".join(line.removeprefix("[0]<stdout>:") for line in lines), found[0][1]


# -- in a rank -----------------------------------------------------------------------------------


def _run_in_rank(rank: int, size: int, arguments: list[str], folder: str) -> tuple[str, str]:
    os.chdir(folder)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        checksum = run_script(arguments)
    return output.getvalue(), checksum


def run_script(arguments: list[str]) -> str:
    """Run a script with its arguments; a checksum of all variables that it optimized last."""
    values = _note_trained_variables()
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"the script ended with {end.code!r}") from None
    digest = hashlib.sha256()
    trained = values()
    assert trained, "the script trained nothing"
    for value in trained:
        digest.update(value.tobytes())
    return digest.hexdigest()


def _note_trained_variables() -> Callable[[], list[Any]]:
    """Have the optimizers of this process's Keras note what they are for."""
    legacy = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
    keras: Any = importlib.import_module("tf_keras" if legacy else "keras")
    trained: list[Any] = []
    build = keras.optimizers.Optimizer.build

    def build_and_note(self: Any, variables: Any) -> Any:
        trained[:] = variables
        return build(self, variables)

    keras.optimizers.Optimizer.build = build_and_note
    if legacy:
        return lambda: [variable.numpy() for variable in trained]
    return lambda: [keras.ops.convert_to_numpy(variable) for variable in trained]


if __name__ == "__main__":
    print("checksum", run_script(sys.argv[1:]), flush=True)
