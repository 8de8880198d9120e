"""The MXNet examples under horovodrun, cut short: they learn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import clean_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["mxnet_mnist.py", "mxnet_module.py"])
def test_examples_learn(tmp_path: Path, script: str):
    short = ["--epochs", "5", "--target-accuracy", "0.7"]
    program = [sys.executable, str(ROOT / "examples" / "mxnet" / script), *short]
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner", "-np", "2", *program],
        env=clean_environment() | {"PYTHONPATH": str(ROOT), "HOROVOD_START_TIMEOUT": "200"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0]<stdout>:test accuracy:" in done.stdout
