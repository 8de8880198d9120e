"""The JAX examples, each cut short on two ranks: they learn, and their ranks agree."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.effort import LONG
from tests.ranks import clean_environment, run_ranks
from tests.tensorflow.growing import lose_one_of_two

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ELASTIC = EXAMPLES / "elastic" / "jax_mnist_elastic.py"
HANG = 280.0  # seconds; no example that is cut short takes a tenth of it


def _run_in_rank(
    rank: int, size: int, arguments: list[str], folder: str, is_optimized: bool
) -> str:
    """Run a script; what it prints. Parameters and state of its last update must be alike."""
    import jax
    import optax

    import horovod.jax as hvd

    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    os.chdir(folder)
    seen: list[Any] = []
    original = hvd.DistributedOptimizer

    def noted(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        return optax.GradientTransformationExtraArgs(
            lambda params: seen.append(params) or optimizer.init(params), optimizer.update
        )

    hvd.DistributedOptimizer = noted
    output = io.StringIO()
    sys.argv = arguments
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"the script ended with {end.code!r}") from None
    import numpy as np

    (params,) = seen  # what all ranks began with
    for mine, other in zip(*hvd.allgather_object(jax.tree.map(np.asarray, params)), strict=True):
        assert str(mine) == str(other)
    return output.getvalue()


def run_in_ranks(script: str, *options: str, cwd: Path) -> str:
    """What rank 0 of two prints.

    XLA takes longer to optimize these programs than to run them, so it does in long tests alone.
    """
    arguments = [str(EXAMPLES / script), *options]
    output, other = run_ranks(_run_in_rank, 2, arguments, str(cwd), LONG, timeout=HANG)
    assert other == "", "rank 0 alone should speak"
    return output


def test_plain_jax_learns(tmp_path: Path):
    output = run_in_ranks(
        "jax/jax_mnist.py", "--epochs", "4", "--target-accuracy", "0.85", cwd=tmp_path
    )
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    assert re.search(r"^test accuracy: (8[5-9]|9\d|100)", output, re.MULTILINE), output


def test_flax_learns(tmp_path: Path):
    output = run_in_ranks(
        "jax/flax_mnist.py", "--epochs", "2", "--target-accuracy", "0.8", cwd=tmp_path
    )
    assert "epoch  2: loss" in output


def test_the_transformer_learns(tmp_path: Path):
    small = ("--width", "16", "--batch-size", "16", "--lr", "0.01")
    size = ("--width", "32") if LONG else small
    options = ("--steps", "100", "--passes", "2", "--layers", "1", *size)
    output = run_in_ranks("jax/jax_transformer.py", *options, cwd=tmp_path)
    first, second = (float(found) for found in re.findall(r"loss ([\d.]+)", output))
    assert second < first


def test_under_horovodrun_as_documented(tmp_path: Path):
    program = [sys.executable, str(EXAMPLES / "jax" / "jax_mnist.py"), "--fp16-allreduce"]
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner", "-np", "2", *program, "--epochs", "1"],
        env=clean_environment() | {"PYTHONPATH": str(ROOT), "HOROVOD_START_TIMEOUT": "200"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0]<stdout>:test accuracy:" in done.stdout


def test_the_elastic_example_survives_a_kill_and_learns():
    short = ("--epochs", "4", "--target-accuracy", "0.8")
    output = lose_one_of_two(str(ELASTIC), *short, when="epoch  1: ")
    epochs = [int(number) for number in re.findall(r"epoch +(\d): .* with 1 process", output)]
    assert epochs == [2, 3, 4], "it goes on from the last commit"
    assert "final test accuracy" in output


@pytest.mark.parametrize("path", [*sorted((EXAMPLES / "jax").glob("*.py")), ELASTIC], ids=str)
def test_documented_commands_name_the_script(path: Path):
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python {path.relative_to(ROOT)}" in text
