"""The examples of the function API, run the way a user does: by spark-submit, cut short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.cluster import HANG, QUICK_JAVA, REPOSITORY, spark_environment

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start Java
FOLDER = REPOSITORY / "examples" / "spark" / "pytorch"


def submit(cwd: Path, script: str, *options: str) -> str:
    command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]"]
    command += ["--conf", "spark.ui.enabled=false"]
    command += ["--conf", f"spark.driver.extraJavaOptions={QUICK_JAVA}"]
    done = subprocess.run(
        [*command, str(FOLDER / script), *options],
        env=spark_environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout


def test_run_learns_the_digits(tmp_path: Path):
    said = submit(
        tmp_path, "pytorch_spark_run_mnist.py", "--epochs", "4", "--target-accuracy", "0.9"
    )
    assert said.count("[0]<stdout>:epoch") == 4
    assert re.search(r"final test accuracy: [\d.]+%, 2 process\(es\)", said)


def test_run_elastic_learns_the_digits(tmp_path: Path):
    options = ["--epochs", "4", "--min-num-proc", "2", "--max-num-proc", "2"]
    options += ["--target-accuracy", "0.9"]
    said = submit(tmp_path, "pytorch_spark_elastic_mnist.py", *options)
    assert said.count("epoch") >= 4
    assert re.search(r"final accuracy: [\d.]+%, 2 process\(es\)", said)
