"""The examples of the estimators, cut short, on the cluster of the session."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.parquet import PATIENCE

pytestmark = pytest.mark.timeout(PATIENCE)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "spark"


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
def test_example(
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
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(result, capfd.readouterr().out)
