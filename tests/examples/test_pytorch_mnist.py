"""The example that `make train` runs: it learns, resumes, and says when it fails."""

from __future__ import annotations

import gzip
import os
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.examples.programs import PYTORCH, run_example

SCRIPT = "pytorch_mnist.py"


def _train(tmp_path: Path, *options: str, **how: Any) -> subprocess.CompletedProcess[str]:
    checkpoint = ("--checkpoint", tmp_path / "folder" / "model.pt")
    return run_example(SCRIPT, *checkpoint, *options, cwd=tmp_path, **how)


def _final_accuracy(done: subprocess.CompletedProcess[str]) -> float:
    found = re.findall(r"final test accuracy: ([\d.]+)%", done.stdout)
    assert len(found) == 1, done.stdout + done.stderr  # rank 0 alone says it
    return float(found[0]) / 100


def test_four_processes_learn_the_digits(tmp_path: Path):
    done = _train(tmp_path, "--target-accuracy", "0.95", ranks=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _final_accuracy(done) >= 0.95
    assert "epoch 1/" not in done.stderr  # no bar where nobody watches
    assert os.listdir(tmp_path / "folder") == ["model.pt"]
    assert torch.load(tmp_path / "folder" / "model.pt")["epoch"] == 12


@pytest.mark.parametrize("batch_size", [8, 32])
def test_the_learning_rate_suits_sixteen_processes(
    monkeypatch: pytest.MonkeyPatch, batch_size: int
):
    """One process takes the batches of all: the average of their gradients is the same."""
    monkeypatch.setattr("sys.argv", [SCRIPT])
    example = runpy.run_path(str(PYTORCH / SCRIPT))
    args = example["parse_arguments"]()
    stand_in = SimpleNamespace(
        size=lambda: 16,
        rank=lambda: 0,
        allreduce=lambda value, name, op=None: value,
        Sum=None,
        stats=SimpleNamespace(log=lambda **_: None),
    )
    monkeypatch.setitem(example["train_epoch"].__globals__, "hvd", stand_in)
    torch.manual_seed(args.seed)
    train_data, test_data = example["load_data"](None)
    batches = DataLoader(train_data, 16 * batch_size, shuffle=True)
    model, cpu = example["Net"](8), torch.device("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        example["train_epoch"](model, optimizer, batches, cpu, epoch, args)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(16 * args.lr)
    images, labels = test_data.tensors
    assert (model(images).argmax(1) == labels).float().mean() >= 0.95


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("torchrun", ["--fp16-allreduce", "--gradient-predivide-factor", "2"]),
        ("mpirun", ["--use-adasum", "--lr", "0.003"]),
    ],
)
def test_other_launchers_and_ways_to_reduce(tmp_path: Path, launcher: str, options: list[str]):
    done = _train(tmp_path, "--epochs", "4", *options, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with 2 process(es)" in done.stdout
    assert _final_accuracy(done) > 0.85


def test_training_resumes_with_another_number_of_processes(tmp_path: Path):
    assert _train(tmp_path, "--epochs", "1").returncode == 0
    done = _train(tmp_path, "--epochs", "2", "--resume", launcher=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from epoch 2" in done.stdout
    assert "epoch  1:" not in done.stdout
    assert "epoch  2:" in done.stdout


def test_missing_the_target_fails_the_job(tmp_path: Path):
    done = _train(tmp_path, "--epochs", "0", "--target-accuracy", "0.9")
    assert done.returncode != 0
    assert "below the target" in done.stderr


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
            content = header + data.tobytes()
            if prefix == "train":
                (folder / f"{prefix}-{kind}-ubyte").write_bytes(content)
            else:
                (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    return folder


def test_idx_files_are_read(tmp_path: Path, idx_folder: Path):
    done = _train(tmp_path, "--data-dir", str(idx_folder), "--epochs", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training on 1500 images" in done.stdout
    assert _final_accuracy(done) > 0.8


def test_a_folder_without_the_files_is_named(tmp_path: Path):
    done = _train(tmp_path, "--data-dir", str(tmp_path))
    assert done.returncode != 0
    assert "has neither train-images-idx3-ubyte nor" in done.stderr
