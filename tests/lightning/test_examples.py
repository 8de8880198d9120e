"""The examples, run the way a user does: under each launcher, and while a worker is killed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.elastic.launched import Launched
from tests.examples.programs import run_example, run_with_checksums
from tests.runner.horovodrun import ROOT

SCRIPT = "pytorch_lightning_mnist.py"
PATIENCE = 250.0  # seconds; importing Lightning alone may take a busy machine one of the minutes
ELASTIC = str(ROOT / "examples" / "elastic" / "pytorch_lightning_mnist_elastic.py")


def test_two_processes_learn_the_digits_with_the_same_weights(tmp_path: Path):
    said, _ = run_with_checksums(SCRIPT, "--target-accuracy", "0.95", cwd=tmp_path, fresh=True)
    assert said.count("final test accuracy") == 1  # rank 0 alone says it
    assert "training with 2 process(es)" in said
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_other_launchers(tmp_path: Path, launcher: str):
    options = ["--epochs", "4", "--fp16-allreduce"]
    done = run_example(SCRIPT, *options, cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training with 2 process(es)" in done.stdout
    (found,) = re.findall(r"final test accuracy: ([\d.]+)%", done.stdout)
    assert float(found) > 85


def test_one_process_resumes_what_two_have_begun(tmp_path: Path):
    assert run_example(SCRIPT, "--epochs", "1", cwd=tmp_path).returncode == 0
    done = run_example(SCRIPT, "--epochs", "2", "--resume", cwd=tmp_path, launcher=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training with 1 process(es)" in done.stdout
    assert "Restoring states from the checkpoint path" in done.stderr


DOCUMENTED = """
import sys

import pytorch_lightning as pl
import horovod.torch
from pytorch_lightning.demos.boring_classes import BoringModel

model = BoringModel()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1)
trainer = pl.Trainer({line}, **quiet)
trainer.fit(model)
weight = model.layer.weight.sum().item()
sys.stdout.write(f"rank {{trainer.global_rank}} of {{trainer.world_size}} {{weight}}\\n")
"""


@pytest.mark.parametrize(
    ("line", "launcher"),
    [("strategy='horovod'", "mpirun"), ("accelerator='horovod'", "torchrun")],
)
def test_the_documented_line(tmp_path: Path, line: str, launcher: str):
    script = tmp_path / "script.py"
    script.write_text(DOCUMENTED.format(line=line))
    done = run_example(str(script), cwd=tmp_path, launcher=launcher, fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"rank (\d) of 2 (\S+)", done.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1"], done.stdout + done.stderr
    assert found[0][1] == found[1][1]


def test_the_elastic_example_survives_a_kill_and_learns(tmp_path: Path):
    options = ["-H", "localhost:2", "--min-np", "1", "-np", "2"]
    program = [ELASTIC, "--epochs", "10", "--batches-per-commit", "3", "--target-accuracy", "0.9"]
    with Launched(tmp_path, options, program=program, patience=PATIENCE, forked=True) as job:
        job.await_output("epoch  1")
        job.kill("w0")
        job.await_event("formed", decision=2)
        assert job.wait() == 0, str(job)
        lines = re.findall(r"epoch +(\d+): step (\d+), .* (\d) process", job.output)
        epochs = [int(number) for number, _, _ in lines]
        assert sorted(set(epochs)) == list(range(1, 11)), "none is left out"
        assert job.output.count("final test accuracy") == 1
        assert "the last commit, in memory" in job.errors
        assert [len(event["workers"]) for event in job.events("decision")][:2] == [2, 1]
        job.check_nothing_left()


def test_a_worker_that_is_told_to_leave_commits_first(tmp_path: Path):
    options = ["-H", "localhost:2", "--min-np", "1", "-np", "2"]
    program = [ELASTIC, "--epochs", "8", "--batches-per-commit", "2"]
    with Launched(tmp_path, options, program=program, patience=PATIENCE, forked=True) as job:
        job.await_output("epoch  1")
        job.kill("w1", signal.SIGTERM)
        job.await_event("formed", decision=2)
        assert job.wait() == 0, str(job)
        assert "leaving the job at the next commit" in job.errors
        assert "going back to the last commit" not in job.errors, "nothing was lost"
        epochs = [int(number) for number in re.findall(r"epoch +(\d+):", job.output)]
        assert epochs == list(range(1, 9)), "none is left out, and none repeated"
        job.check_nothing_left()
