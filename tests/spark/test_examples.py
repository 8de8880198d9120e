"""The examples, cut short: by spark-submit, and on the session's cluster."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.cluster import FORKED_DAEMON, HANG, QUICK_JAVA, REPOSITORY, forked_environment

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start Java
FOLDER = REPOSITORY / "examples" / "spark"


def test_run_learns_the_digits(tmp_path: Path):
    settings = ["spark.ui.enabled=false", f"spark.driver.extraJavaOptions={QUICK_JAVA}"]
    command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]"]
    command += [word for each in (*settings, FORKED_DAEMON) for word in ("--conf", each)]
    command += [str(FOLDER / "pytorch/pytorch_spark_run_mnist.py")]
    done = subprocess.run(
        [*command, "--epochs", "4", "--target-accuracy", "0.9"],
        env=forked_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert done.stdout.count("[0]<stdout>:epoch") == 4
    assert re.search(r"final test accuracy: [\d.]+%, 2 process\(es\)", done.stdout)


def test_run_elastic_learns_the_digits(
    whole: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    options = ["--epochs", "4", "--min-num-proc", "2", "--max-num-proc", "2"]
    options += ["--target-accuracy", "0.9"]
    monkeypatch.setattr(type(whole), "stop", lambda self: None)  # the session is everybody's
    monkeypatch.setattr(sys, "argv", ["elastic", *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "pytorch/pytorch_spark_elastic_mnist.py"), run_name="__main__")
    said = capfd.readouterr().out
    assert ended.value.code == 0, said
    assert said.count("epoch") >= 4
    assert re.search(r"final accuracy: [\d.]+%, 2 process\(es\)", said)


@pytest.mark.parametrize(
    ("script", "options", "result"),
    [
        ("pytorch/pytorch_spark_mnist.py", ["--epochs", "4"], r"test accuracy: (0\.[89]\d*)"),
        (
            "pytorch/pytorch_spark_rossmann.py",
            ["--epochs", "6", "--days", "40", "--target-rmspe", "0.5"],
            r"test RMSPE: (0\.\d+)",
        ),
        (
            "pytorch/pytorch_lightning_spark_mnist.py",
            ["--epochs", "4"],
            r"test accuracy: (0\.[89]\d*)",
        ),
        ("keras/keras_spark_mnist.py", ["--epochs", "4"], r"test accuracy: (0\.[89]\d*)"),
    ],
)
def test_estimators(
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    script: str,
    options: list[str],
    result: str,
):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(type(spark), "stop", lambda self: None)  # the session is everybody's
    monkeypatch.setattr(sys, "argv", [script, "--work-dir", str(tmp_path), *options])
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    assert re.search(result, capfd.readouterr().out)
