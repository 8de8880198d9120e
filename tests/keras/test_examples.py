"""The Keras example on every backend, cut short on two ranks: it learns, and its ranks agree."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from tests.keras.flavours import FLAVOURS
from tests.tensorflow.programs import run_in_ranks, run_under_horovodrun

SCRIPT = "keras/keras_mnist.py"


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """scikit-learn's digits in MNIST's format, half of the files gzipped."""
    from sklearn.datasets import load_digits  # here: collecting tests takes long enough

    digits = load_digits()
    images, labels = (digits.images * 15).astype(np.uint8), digits.target.astype(np.uint8)
    folder = tmp_path / "idx"
    folder.mkdir()
    for prefix, part in (("train", slice(0, 1500)), ("t10k", slice(1500, None))):
        for kind, data in (("images-idx3", images[part]), ("labels-idx1", labels[part])):
            header = bytes([0, 0, 8, data.ndim]) + np.array(data.shape, ">u4").tobytes()
            name, content = f"{prefix}-{kind}-ubyte", header + data.tobytes()
            if prefix == "train":
                (folder / name).write_bytes(content)
            else:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


def _accuracy(output: str, backend: str) -> float:
    assert f"training with 2 process(es) on {backend}" in output
    assert len(re.findall(r"^24/24 - ", output, re.MULTILINE)) == 2, output  # 1500 / 2 / 32 steps
    (accuracy,) = re.findall(r"^final test accuracy: ([\d.]+)%$", output, re.MULTILINE)
    return float(accuracy)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_learns(tmp_path: Path, idx_folder: Path, backend: str):
    options = ("--data-dir", idx_folder, "--epochs", "2", "--lr", "0.002")
    output, _ = run_in_ranks(SCRIPT, *options, cwd=tmp_path, env=FLAVOURS[backend])
    assert _accuracy(output, backend) > 60
    assert (tmp_path / "checkpoints" / "keras_mnist.keras").is_file()


def test_goes_on_from_its_checkpoint_under_horovodrun(tmp_path: Path, idx_folder: Path):
    options = (
        "--data-dir",
        idx_folder,
        "--epochs",
        "2",
        "--checkpoint",
        tmp_path / "c" / "m.keras",
    )
    output, _ = run_in_ranks(SCRIPT, *options, cwd=tmp_path, env=FLAVOURS["torch"])
    more = ("--resume", "--target-accuracy", "0.7")
    again, _ = run_under_horovodrun(SCRIPT, *options, *more, cwd=tmp_path, env=FLAVOURS["torch"])
    assert _accuracy(again, "torch") > _accuracy(output, "torch")
