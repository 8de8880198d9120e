"""The PyTorch examples, each cut short on two ranks: they learn, and their ranks agree."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.examples.programs import PYTORCH, run_example, run_with_checksums

SCRIPTS = sorted(path.name for path in PYTORCH.glob("pytorch_*.py"))
SMALL_RESNET = (
    *("--depth", "10", "--width", "8", "--image-size", "32", "--classes", "4"),
    *("--batch-size", "8", "--batches-per-epoch", "6", "--val-batches", "2", "--base-lr", "0.1"),
)


def _numbers(pattern: str, output: str) -> list[float]:
    """What the group of `pattern` matches in each line of rank 0; other ranks say nothing."""
    lines = [line for line in output.splitlines() if re.search(pattern, line)]
    assert all(line.startswith("[0]<stdout>:") for line in lines)
    return [float(re.search(pattern, line)[1]) for line in lines]


# -- each example --------------------------------------------------------------------------------


def test_resnet_learns_and_resumes_where_it_stopped(tmp_path: Path):
    """A run that was stopped after an epoch ends bit by bit where an uninterrupted one does."""
    options = (*SMALL_RESNET, "--epochs", "3", "--batches-per-allreduce", "2", "--workers", "1")
    options += (
        "--warmup-epochs",
        "2",
        "--decay-epochs",
        "2",
        "--checkpoint-format",
        "c/{epoch}.pt",
    )
    whole, expected = run_with_checksums("pytorch_imagenet_resnet50.py", *options, cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["1.pt", "2.pt", "3.pt"]
    losses = _numbers(r" loss ([\d.]+), accuracy [\d.]+%, validation", whole)
    assert losses[2] < losses[0]
    # From one batch's rate over that of the step (2 batches on each of 2 ranks) to a tenth of it.
    assert _numbers(r" lr ([\d.]+)", whole) == pytest.approx([0.225, 0.375, 0.04])
    (tmp_path / "c" / "3.pt").unlink()
    (tmp_path / "c" / "2.pt").unlink()

    rest, resumed = run_with_checksums("pytorch_imagenet_resnet50.py", *options, cwd=tmp_path)
    assert "resuming after epoch 1" in rest
    assert resumed == expected
    metrics = r"(epoch [23]: .* accuracy [\d.]+%), [\d.]+ images/s"
    assert re.findall(metrics, rest) == re.findall(metrics, whole)


def test_synthetic_benchmark_prints_images_per_second(tmp_path: Path):
    small = ("--model", "resnet10", "--image-size", "32", "--batch-size", "2", "--fp16-allreduce")
    counts = ("--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "3")
    done = run_example("pytorch_synthetic_benchmark.py", *small, *counts, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rates = _numbers(r"Iteration \d: ([\d.]+) img/sec per [CG]PU", done.stdout)
    (mean,) = _numbers(r"Img/sec per [CG]PU: ([\d.]+) \+-[\d.]+$", done.stdout)
    (total,) = _numbers(r"Total img/sec on 2 [CG]PU\(s\): ([\d.]+) \+-[\d.]+$", done.stdout)
    assert len(rates) == 3
    assert mean == pytest.approx(sum(rates) / 3, abs=0.1)
    assert total == pytest.approx(2 * mean, abs=0.2)


def test_language_model_gets_less_perplexed(tmp_path: Path):
    small = ("--width", "32", "--layers", "1", "--context", "32", "--checkpoint", "lm.pt")
    steps = ("--epochs", "2", "--steps-per-epoch", "40", "--report-seconds", "0")
    output, _ = run_with_checksums("pytorch_lm.py", *small, *steps, cwd=tmp_path)
    assert "epoch 2: step 39 of 40" in output
    before, first, second = _numbers(r"(?:\d, |training: )perplexity ([\d.]+)", output)
    assert before > 200  # of 256 bytes
    assert first < 60
    assert second < 0.8 * first
    assert torch.load(tmp_path / "lm.pt")["bytes.weight"].shape == (256, 32)


def test_gpt_resumes_with_the_losses_of_an_uninterrupted_run(tmp_path: Path):
    small = ("--width", "32", "--layers", "2", "--context", "32", "--text-bytes", "200000")
    small += ("--backend", "eager", "--precision", "bfloat16", "--checkpoints", "c")
    steps = ("--steps", "30", "--report-every", "5", "--checkpoint-every", "15", "--lr", "0.01")
    whole, expected = run_with_checksums("pytorch_gpt.py", *small, *steps, cwd=tmp_path)
    losses = _numbers(r"step \d+: loss ([\d.]+)", whole)
    assert len(losses) == 6
    assert losses[0] > 4.5  # of 5.5, for 256 bytes
    assert losses[-1] < 0.75 * losses[0]
    assert _numbers(r"^.*test loss ([\d.]+)", whole)[0] < 0.75 * losses[0]
    newest, last = sorted((tmp_path / "c").iterdir())
    assert (newest.name, last.name) == ("step-00000015.pt", "step-00000030.pt")
    last.unlink()

    rest, resumed = run_with_checksums("pytorch_gpt.py", *small, *steps, "--resume", cwd=tmp_path)
    assert "from step 16" in rest
    assert _numbers(r"step \d+: loss ([\d.]+)", rest) == losses[3:]
    assert resumed == expected


def test_a_compiled_step_learns_the_digits(tmp_path: Path):
    options = ("--epochs", "2", "--backend", "aot_eager", "--checkpoint", "m.pt")
    output, _ = run_with_checksums("pytorch_compile.py", *options, cwd=tmp_path)
    assert "compiled by aot_eager: step" in output
    assert _numbers(r"test accuracy ([\d.]+)%", output)[-1] > 90
    assert "0.weight" in torch.load(tmp_path / "m.pt")


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16 amx_bf16", torch.bfloat16),
        ("flags : fpu avx2 avx512f", torch.float32),
        ("Features : fp asimd i8mm bf16", torch.bfloat16),
        ("Features : fp asimd fphp asimdhp", torch.float32),
    ],
)
def test_language_model_computes_in_what_the_cpu_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, precision: torch.dtype
):
    example = runpy.run_path(str(PYTORCH / "pytorch_lm.py"))
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    has_bfloat16 = example["cpu_has_bfloat16"](tmp_path / "cpuinfo")
    choose = example["choose_precision"]
    monkeypatch.setitem(choose.__globals__, "cpu_has_bfloat16", lambda: has_bfloat16)
    assert choose(None, torch.device("cpu")) is precision
    assert choose("bfloat16", torch.device("cpu")) is torch.bfloat16
    assert choose(None, torch.device("cuda")) is torch.float16


def test_word_vectors_are_learnt_from_sparse_gradients(tmp_path: Path):
    options = ("--epochs", "2", "--window", "1", "--checkpoint", "w.pt")
    output, _ = run_with_checksums("pytorch_word2vec.py", *options, cwd=tmp_path)
    first, second = _numbers(r"loss ([\d.]+)", output)
    assert second < 0.95 * first
    assert len(re.findall(r"near list: \w+, \w+, \w+, \w+, \w+$", output, re.MULTILINE)) == 1
    saved = torch.load(tmp_path / "w.pt")
    assert len(saved["words"]) == len(saved["vectors"])


def test_both_ways_to_accumulate_give_the_same_model(tmp_path: Path):
    """Two batches of 7 images make a step, except the last of an epoch: one batch of 5."""
    small = ("--epochs", "1", "--batch-size", "7", "--batches-per-step", "2")
    checksums = []
    for accumulation in ("count", "no-sync"):
        options = (*small, "--accumulation", accumulation, "--checkpoint", "model.pt")
        output, checksum = run_with_checksums("pytorch_sync_batch_norm.py", *options, cwd=tmp_path)
        assert _numbers(r"test accuracy ([\d.]+)%", output)[-1] > 80
        assert "7 images in a forward pass, 14 in a normalisation, 28 in a step" in output
        checksums.append(checksum)
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow"])
def test_numbers_in_a_tracker(tmp_path: Path, tracker: str):
    script = f"pytorch_stats_{tracker}.py"
    done = run_example(script, "--epochs", "2", cwd=tmp_path)
    if importlib.util.find_spec(tracker) is None:
        assert done.returncode != 0
        assert re.search(f"this example needs .*: pip install {tracker}", done.stdout + done.stderr)
        pytest.skip(f"{tracker} is not installed: the example says so")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = _numbers(r"epoch \d: loss ([\d.]+)", done.stdout)
    assert second < first
    if tracker == "tensorboard":
        for rank in range(2):
            _check_events(tmp_path / "runs" / f"rank{rank}", second)
    elif tracker == "wandb":
        assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 2
    else:
        _check_runs(tmp_path / "mlflow.db", second)


def _check_events(folder: Path, loss: float) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert scalars["loss"][-1].value == pytest.approx(loss, abs=1e-3)
    from sklearn.datasets import load_digits  # here: collecting tests takes long enough

    steps = -(-len(load_digits().images) // 2 // 32)  # of a rank in an epoch
    assert [event.step for event in scalars["loss"]] == [steps, 2 * steps]
    for name in ("share_of_waiting", "share_of_reducing"):
        assert 0 < scalars[name][-1].value < 1
    assert scalars["steps_per_second"][-1].value > 0
    assert scalars["memory_bytes"][-1].value > 1e7


def _check_runs(database: Path, loss: float) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{database}")
    runs = mlflow.search_runs(experiment_names=["horovod"])
    assert len(runs) == 2
    assert runs["metrics.loss"].tolist() == pytest.approx([loss] * 2, abs=1e-3)
    assert (runs["metrics.share_of_waiting"] > 0).all()


# -- all of them ---------------------------------------------------------------------------------


def _functions(script: str) -> dict[str, str]:
    tree = ast.parse((PYTORCH / script).read_text())
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("choose_device", 8),
        ("shows_progress", 8),  # the others draw no bar, or have a Trainer that does all of it
        ("choose_backend", 2),
        ("cpu_has_bfloat16", 2),
    ],
)
def test_what_scripts_repeat_is_the_same_in_all(name: str, least: int):
    """Each is one file to copy, so they share no module for these few lines."""
    found = [functions[name] for functions in map(_functions, SCRIPTS) if name in functions]
    assert len(found) >= least
    assert len(set(found)) == 1


def test_the_readme_has_a_command_for_each():
    text = (PYTORCH.parent / "README.md").read_text()
    commands = re.findall(r"^    horovodrun -np \d+ python examples/pytorch/(\S+)", text, re.M)
    assert sorted(commands) == SCRIPTS
