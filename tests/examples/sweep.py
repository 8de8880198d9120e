"""How accurate the examples are on 1, 2, 4, 8 and 16 ranks: a table, and an exit status.

    python -m tests.examples.sweep                       # all that are installed: an hour
    python -m tests.examples.sweep --ranks 1,16 jax keras

It is a program and no test because it takes long on a small machine: every example runs in full,
at every size. Run it after changing how an example sets its learning rate. Words choose the
examples whose path contains one of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = 95.0  # per cent, at every size
_FOUND = re.compile(r"accuracy:? ([\d.]+)(%?)")


@dataclass(frozen=True)
class Example:
    """A script that prints its test accuracy, and how it is started."""

    script: str
    module: str  # without which it cannot run
    environ: dict[str, str] = field(default_factory=dict)
    launcher: str = "horovodrun"
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.script, *self.options, *self.environ.values()])

    def command(self, ranks: int) -> list[str]:
        program = [sys.executable, str(ROOT / "examples" / self.script), *self.options]
        if self.launcher == "horovodrun":
            return [sys.executable, "-m", "horovod.runner", "-np", str(ranks), *program]
        if self.launcher == "elastic":
            elastic = ["--min-np", str(ranks), "-np", str(ranks), "-H", f"localhost:{ranks}"]
            return [sys.executable, "-m", "horovod.runner", *elastic, *program]
        if self.launcher == "spark":
            submit = str(Path(sys.executable).with_name("spark-submit"))
            return [submit, "--master", f"local[{ranks}]", *program[1:]]
        return [*program, self.launcher, str(ranks)]  # it starts the processes itself


EXAMPLES = [
    Example("pytorch/pytorch_mnist.py", "torch"),
    Example("pytorch/pytorch_mnist.py", "torch", options=("--batch-size", "8")),
    Example("pytorch/pytorch_lightning_mnist.py", "lightning"),
    Example("pytorch/pytorch_sync_batch_norm.py", "torch"),
    Example("pytorch/pytorch_compile.py", "torch", options=("--compile", "nothing")),
    Example("elastic/pytorch_mnist_elastic.py", "torch", launcher="elastic"),
    Example("elastic/pytorch_lightning_mnist_elastic.py", "lightning", launcher="elastic"),
    Example("tensorflow2/tensorflow2_mnist.py", "tensorflow"),
    Example("tensorflow2/tensorflow2_keras_mnist.py", "tensorflow"),
    Example("elastic/tensorflow2_mnist_elastic.py", "tensorflow", launcher="elastic"),
    Example("elastic/tensorflow2_keras_mnist_elastic.py", "tensorflow", launcher="elastic"),
    Example("keras/keras_mnist.py", "keras", {"KERAS_BACKEND": "torch"}),
    Example("jax/jax_mnist.py", "jax"),
    Example("jax/flax_mnist.py", "flax"),
    Example("elastic/jax_mnist_elastic.py", "jax", launcher="elastic"),
    Example("mxnet/mxnet_mnist.py", "mxnet"),
    Example("mxnet/mxnet_module.py", "mxnet"),
    Example("ray/pytorch_ray_mnist.py", "ray", launcher="--num-workers"),
    Example("ray/keras_ray_mnist.py", "ray", launcher="--num-workers"),
    Example("ray/pytorch_ray_elastic.py", "ray", launcher="--max-workers"),
    Example("spark/pytorch/pytorch_spark_run_mnist.py", "pyspark", launcher="spark"),
]


def last_accuracy(output: str) -> float | None:
    """The last accuracy that an example printed, in per cent; None if it printed none."""
    found = _FOUND.findall(output)
    if not found:
        return None
    number, percent = found[-1]
    return float(number) * (1 if percent else 100)


def measure(example: Example, ranks: int) -> float | None:
    with tempfile.TemporaryDirectory() as folder:  # for its checkpoints
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "HOROVOD_START_TIMEOUT": "600"}
        environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **example.environ}
        done = subprocess.run(
            example.command(ranks),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    found = last_accuracy(done.stdout) if done.returncode == 0 else None
    if found is None:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4,8,16", help="sizes, separated by commas")
    parser.add_argument("words", nargs="*", help="only examples whose path has one of these")
    args = parser.parse_args()
    sizes = [int(size) for size in args.ranks.split(",")]
    print("| example | " + " | ".join(map(str, sizes)) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    missed = False
    for example in EXAMPLES:
        if args.words and not any(word in example.name for word in args.words):
            continue
        if importlib.util.find_spec(example.module) is None:
            continue
        found = [measure(example, size) for size in sizes]
        missed |= any(each is None or each < TARGET for each in found)
        cells = ["failed" if each is None else f"{each:.1f} %" for each in found]
        print(f"| `{example.name}` | " + " | ".join(cells) + " |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
