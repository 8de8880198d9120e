#!/usr/bin/env python
"""How fast a JAX step is with Horovod, against ``jax.distributed`` and without communication.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks/jax_rank.py`), tells them whose turn it is, and reports; see --help.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Measure this checkout, whatever else is installed; and not this folder, whose jax.py (we) would be
# taken for JAX.
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

from benchmarks import framework_steps  # noqa: E402
from benchmarks.processes import (  # noqa: E402
    Commands,
    Progress,
    environment,
    free_port,
    limit,
    positive,
    torchrun_environments,
)
from benchmarks.promises import (  # noqa: E402
    Requirement,
    add_options,
    all_met,
    warn_if_busy,
    write_files,
)
from benchmarks.turns import Samples  # noqa: E402

RANKS = 2
MODELS = {"mlp": "MLP, 1.9 M parameters", "transformer": "transformer, 4 layers, 0.8 M parameters"}
CONTENDERS = {
    "ours": "horovod.jax",
    "distributed": "jax.distributed, shard_map and psum over Gloo",
    "plain": "no communication",
}
PAIRS = [("distributed", "ours"), ("plain", "ours")]
WANTED = 1.2  # times as fast as jax.distributed

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


def requirements(
    found: dict[str, Samples], losses: dict[str, dict[str, float]]
) -> Iterator[Requirement]:
    for model in MODELS:
        text = f"{model}: {WANTED}x jax.distributed"
        if model not in found:
            yield Requirement(text, None, "not measured")
        else:
            yield from framework_steps.requirements(
                text, "distributed", WANTED, found[model], losses[model]
            )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    progress = Progress(len(options.models))
    found: dict[str, Samples] = {}
    losses: dict[str, dict[str, float]] = {}
    with limit(options.timeout):
        for model in options.models:
            progress.show(f"{model}: compiling, and taking turns")
            found[model], losses[model] = framework_steps.measure(
                list(CONTENDERS),
                lambda name, _, model=model: nullcontext(commands(model, name, options.steps)),
                PAIRS,
                options.seconds,
            )
            progress.clear()
            title = f"{MODELS[model]}, {RANKS} ranks"
            print(f"\n{framework_steps.table(title, CONTENDERS, found[model])}\n", flush=True)
            progress.advance(f"{model} done")
    progress.clear()
    write_files(
        "jax",
        options.output,
        lambda path: framework_steps.write_csv(found, path),
        lambda path: framework_steps.write_plot(found, MODELS, path),
    )
    met = all_met(requirements(found, losses))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
