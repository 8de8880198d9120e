"""The examples, cut short, on the tests' cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.forked_python import forked_python
from tests.ray.conftest import ROOT

pytestmark = pytest.mark.timeout(900)

EXAMPLES = ROOT / "examples" / "ray"


def run(cluster: Any, script: str, *options: str) -> str:
    done = subprocess.run(
        [*forked_python(), str(EXAMPLES / script), "--address", cluster.address, *options],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "KERAS_BACKEND": "torch"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["pytorch_ray_mnist.py", "keras_ray_mnist.py"])
def test_digits(cluster: Any, script: str):
    output = run(cluster, script, "--epochs", "4", "--target-accuracy", "0.85")
    losses = [float(loss) for loss in re.findall(r"epoch +\d+: loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "with 2 processes" in output


def test_elastic(cluster: Any):
    output = run(cluster, "pytorch_ray_elastic.py", "--epochs", "4", "--target-accuracy", "0.8")
    assert re.findall(r"epoch +(\d+) with [12] processes", output) == ["1", "2", "3", "4"]
    assert "test accuracy" in output


def test_tune(cluster: Any, tmp_path: Path):
    few = ["--lrs", "0.001", "0.02", "--epochs", "2", "--num-workers", "1"]
    output = run(cluster, "pytorch_ray_tune.py", *few, "--storage", str(tmp_path))
    assert "best: lr 0.02" in output
    assert (tmp_path / "lr0.02").is_dir()
