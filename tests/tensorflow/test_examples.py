"""The TensorFlow examples, each cut short on two ranks: they learn, and their ranks agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tensorflow.programs import EXAMPLES, run_in_ranks

SCRIPTS = sorted((EXAMPLES / "tensorflow2").glob("tensorflow2_*.py"))
KERAS_SCRIPTS = sorted((EXAMPLES / "keras").glob("*.py"))


def _number(pattern: str, output: str) -> float:
    found = re.findall(pattern, output, re.MULTILINE)
    assert len(found) == 1, output
    return float(found[0])


# -- each example --------------------------------------------------------------------------------


def test_loop_with_a_tape_learns_and_its_checkpoint_brings_it_back(tmp_path: Path):
    script = "tensorflow2/tensorflow2_mnist.py"
    options = ("--steps", "240", "--checkpoint-dir", tmp_path / "c")
    output, trained = run_in_ranks(
        script, *options, "--fp16-allreduce", "--target-accuracy", "0.8", cwd=tmp_path
    )
    assert "training on 1437 images with 2 process(es)" in output
    assert "step 120: loss" in output
    accuracy = _number(r"^final test accuracy: ([\d.]+)%", output)
    assert accuracy >= 80

    # All steps are done: what is read is what was written, on both ranks.
    again, resumed = run_in_ranks(script, *options, "--resume", cwd=tmp_path)
    assert "from step 120" in again
    assert _number(r"^final test accuracy: ([\d.]+)%", again) == accuracy
    assert resumed == trained


@pytest.mark.parametrize("legacy", ["0", "1"], ids=["keras3", "tf_keras"])
def test_fit_as_documented(tmp_path: Path, legacy: str):
    options = ("--epochs", "1", "--warmup-epochs", "2", "--batch-size", "16", "--lr", "0.002")
    output, _ = run_in_ranks(
        "tensorflow2/tensorflow2_keras_mnist.py",
        *(*options, "--checkpoint-dir", tmp_path / "c"),
        cwd=tmp_path,
        env={"TF_USE_LEGACY_KERAS": legacy},
    )
    assert re.search(r"^250/250 - ", output, re.MULTILINE), output  # 500 // 2
    assert _number(r" lr: ([\d.e-]+)", output) == pytest.approx(0.003)  # halfway from 0.002
    assert _number(r"^final test accuracy: ([\d.]+)% with 2 process", output) > 85
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["checkpoint-1.keras"]


@pytest.mark.parametrize("script", ["synthetic_benchmark", "keras_synthetic_benchmark"])
def test_synthetic_benchmarks_print_images_per_second(tmp_path: Path, script: str):
    small = ("--model", "MobileNet", "--image-size", "32", "--batch-size", "2")
    counts = ("--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "3")
    options = (*small, *counts, "--fp16-allreduce")
    output, _ = run_in_ranks(f"tensorflow2/tensorflow2_{script}.py", *options, cwd=tmp_path)
    rates = re.findall(r"^Iteration \d: ([\d.]+) img/sec per [CG]PU$", output, re.MULTILINE)
    mean = _number(r"^Img/sec per [CG]PU: ([\d.]+) \+-[\d.]+$", output)
    total = _number(r"^Total img/sec on 2 [CG]PU\(s\): ([\d.]+) \+-[\d.]+$", output)
    assert len(rates) == 3
    assert mean == pytest.approx(sum(map(float, rates)) / 3, abs=0.1)
    assert total == pytest.approx(2 * mean, abs=0.2)


# -- all of them ---------------------------------------------------------------------------------


def _functions(script: Path) -> dict[str, str]:
    tree = ast.parse(script.read_text())
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("name", "scripts"),
    [
        ("choose_device", SCRIPTS),
        ("verbosity", [*SCRIPTS, *KERAS_SCRIPTS]),
        ("read_idx", [*SCRIPTS, *KERAS_SCRIPTS, EXAMPLES / "pytorch" / "pytorch_mnist.py"]),
    ],
)
def test_what_scripts_repeat_is_the_same_in_all(name: str, scripts: list[Path]):
    """Each is one file to copy, so they share no module for these few lines."""
    found = [functions[name] for functions in map(_functions, scripts) if name in functions]
    assert len(found) > 1
    assert len(set(found)) == 1


def test_the_readme_has_a_command_for_each():
    text = (EXAMPLES / "README.md").read_text()
    commands = re.findall(r"horovodrun .*python examples/((?:tensorflow2|keras)/\S+)", text)
    wanted = {str(path.relative_to(EXAMPLES)) for path in [*SCRIPTS, *KERAS_SCRIPTS]}
    assert set(commands) == wanted
