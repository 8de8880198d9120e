#!/usr/bin/env python
"""How fast a JAX step is with Horovod, against ``jax.distributed`` and without communication.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks/jax_rank.py`), tells them whose turn it is, and reports; see --help.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
# Measure this checkout, whatever else is installed; and not this folder, whose jax.py (we) would be
# taken for JAX.
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

from benchmarks.processes import (  # noqa: E402
    Commands,
    Progress,
    environment,
    free_port,
    group,
    limit,
    positive,
    torchrun_environments,
)
from benchmarks.promises import (  # noqa: E402
    Requirement,
    add_options,
    aligned,
    all_met,
    figure,
    warn_if_busy,
    write_files,
)
from benchmarks.turns import Samples, interval, race, ratios  # noqa: E402

RANKS = 2
MODELS = {"mlp": "MLP, 1.9 M parameters", "transformer": "transformer, 4 layers, 0.8 M parameters"}
CONTENDERS = {
    "ours": "horovod.jax",
    "distributed": "jax.distributed, shard_map and psum over Gloo",
    "plain": "no communication",
}
PAIRS = [("distributed", "ours"), ("plain", "ours")]
WANTED = 1.2  # times as fast as jax.distributed
CLOSE = 1e-3  # the most that losses may differ, relatively

DESCRIPTION = """\
Compare a compiled training step with hvd.DistributedOptimizer to one of jax.distributed, whose two
processes form a mesh and exchange gradients with lax.psum inside of shard_map (the Gloo collectives
of JAX), and to one without communication, on two ranks of this machine.

All train the same models, from the same start on the same data, with SGD and momentum. Each has
processes of its own, which wait while it is not their turn; OMP_NUM_THREADS is 1 and XLA gets one
thread per rank. Ratios are of turns that follow each other.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--seconds", type=positive, default=60.0, metavar="S", help="time for each model (60)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of a turn (20)")
    parser.add_argument(
        "--timeout", type=positive, default=1800.0, metavar="S", help="give up after (1800)"
    )
    add_options(parser, "jax")
    return parser.parse_args(arguments)


def commands(model: str, contender: str, steps: int) -> Commands:
    """The ranks of one job."""
    plan = {"model": model, "contender": contender, "steps": steps, "size": RANKS}
    quiet = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if contender == "distributed":
        plan["coordinator"] = f"127.0.0.1:{free_port()}"
        environments = [environment() for _ in range(RANKS)]
    else:
        environments = torchrun_environments(RANKS)
    return [
        (
            [sys.executable, "-m", "benchmarks.jax_rank", json.dumps({**plan, "rank": rank})],
            environ | quiet,
        )
        for rank, environ in enumerate(environments)
    ]


def measure(
    model: str, options: argparse.Namespace, progress: Progress
) -> tuple[Samples, dict[str, float]]:
    """Seconds per step of every contender's turns, and the loss after its first turn."""
    with ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="horovod-benchmark-"))
        groups, losses = {}, {}
        for name in CONTENDERS:
            progress.show(f"{model}: starting {CONTENDERS[name]}")
            made = commands(model, name, options.steps)
            groups[name] = running.enter_context(group(made, Path(folder, name)))
            answers = groups[name].ask("train")  # compiles
            losses[name] = sum(answer["loss"] for answer in answers) / RANKS
        turns = {
            name: (lambda members=members: max(a["seconds"] for a in members.ask("train")))
            for name, members in groups.items()
        }
        progress.show(f"{model}: taking turns")
        return race(turns, PAIRS, options.seconds), losses


def table(model: str, samples: Samples) -> str:
    rows = [("", "ms/step", "steps/s", "horovod.jax is")]
    for name, title in CONTENDERS.items():
        step = median(samples[name])
        ratio = "" if name == "ours" else f"{median(ratios(samples, name, 'ours')):.2f}x"
        if ratio:
            low, high = interval(ratios(samples, name, "ours"))
            ratio = f"{ratio} as fast ({low:.2f} to {high:.2f})"
        rows.append((title, f"{1000 * step:.2f}", f"{1 / step:.1f}", ratio))
    rounds = len(samples["ours"])
    return "\n".join([f"{MODELS[model]}, {RANKS} ranks, {rounds} rounds", *aligned(rows)])


def requirements(
    found: dict[str, Samples], losses: dict[str, dict[str, float]]
) -> Iterator[Requirement]:
    for model in MODELS:
        text = f"{model}: {WANTED}x jax.distributed"
        if model not in found:
            yield Requirement(text, None, "not measured")
            continue
        ratio = median(ratios(found[model], "distributed", "ours"))
        yield Requirement(text, ratio >= WANTED, f"{ratio:.2f}x")
        ours, theirs = losses[model]["ours"], losses[model]["distributed"]
        same = abs(ours - theirs) <= CLOSE * abs(theirs)
        yield Requirement(f"{model}: the same loss", same, f"{ours:.6f} and {theirs:.6f}")


def write_csv(found: dict[str, Samples], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "contender", "round", "seconds_per_step"])
        for model, samples in found.items():
            for name, seconds in samples.items():
                rows.writerows([model, name, number, each] for number, each in enumerate(seconds))


def write_plot(found: dict[str, Samples], path: Path) -> None:
    with figure(path, 1, len(found)) as panels:
        for panel, (model, samples) in zip(panels[0], found.items(), strict=True):
            rates = [1 / median(samples[name]) for name in CONTENDERS]
            panel.bar(list(CONTENDERS), rates)
            panel.set_title(MODELS[model])
            panel.set_ylabel("steps per second")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    progress = Progress(len(options.models))
    found: dict[str, Samples] = {}
    losses: dict[str, dict[str, float]] = {}
    with limit(options.timeout):
        for model in options.models:
            found[model], losses[model] = measure(model, options, progress)
            progress.clear()
            print(f"\n{table(model, found[model])}\n", flush=True)
            progress.advance(f"{model} done")
    progress.clear()
    write_files(
        "jax",
        options.output,
        lambda path: write_csv(found, path),
        lambda path: write_plot(found, path),
    )
    met = all_met(requirements(found, losses))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
