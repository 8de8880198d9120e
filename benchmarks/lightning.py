#!/usr/bin/env python
"""How fast a Trainer is: ``strategy="horovod"`` against ``strategy="ddp"`` and no communication.

Run by people, and with --check by whoever guards the project's promises. The ranks run
`benchmarks.lightning_rank`; how they are started, timed and shown is `benchmarks.training`'s.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Measure this checkout, whatever else is installed; and `lightning` is not this very file.
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

from benchmarks.processes import Progress  # noqa: E402
from benchmarks.promises import Requirement, all_met, warn_if_busy, write_files  # noqa: E402
from benchmarks.training import duels, jobs  # noqa: E402
from benchmarks.training_jobs import COMPARED  # noqa: E402
from benchmarks.training_models import WORKLOADS  # noqa: E402
from benchmarks.training_options import CONTENDERS, PERCENT, add_common  # noqa: E402
from benchmarks.training_promises import faster, same_losses  # noqa: E402
from benchmarks.training_report import Results, Run, table, write_csv, write_plot  # noqa: E402

SIZE = 2
SPEED = {"mlp": 1.2, "cnn": 1.1, "resnet18": 1.0}

DESCRIPTION = """\
Compare a step of Trainer(strategy="horovod") to one of Trainer(strategy="ddp") with Gloo and to one
without communication, on two ranks of this machine; loggers, bars and checkpoints are off.

Each contender has processes of its own, in which one fit goes on for a few steps at a time while
the others sleep; OMP_NUM_THREADS is 1. Ratios are of turns that follow each other. Then 50 losses
of plain SGD are compared with DDP's.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(SPEED), default=list(SPEED))
    parser.add_argument("--only-speed", action="store_true", help="do not compare losses")
    add_common(parser, "lightning")
    # What only the benchmark of the optimizer itself offers.
    parser.set_defaults(device="cpu", strong=False, bind=False, autotune=False, batch=None)
    parser.set_defaults(force_reduction=False, turn=None, percent=PERCENT["cpu"])
    return parser.parse_args(arguments)


def requirements(run: Run) -> Iterator[Requirement]:
    for model, wanted in SPEED.items():
        yield faster(f"{wanted}x strategy='ddp'", run, model, wanted)
    for model in SPEED:
        yield same_losses(run, model)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    more = 0 if options.only_speed else len(COMPARED)
    progress = Progress(len(options.models) * (1 + more))
    # As a module: as a file, it would take this program for the package `lightning`.
    bench = replace(jobs(SIZE, options, progress), program=("-m", "benchmarks.lightning_rank"))
    run = Run(SIZE, {m: bench.speed(m, CONTENDERS, duels(CONTENDERS)) for m in options.models})
    for model in options.models if more else ():
        run.losses[model] = bench.losses(model)
    progress.clear()
    print(f"\nTrainer: {table(run, 'cpu')}\n")
    for model in options.models:
        steps = {name: 1000 / (run.step(model, name) or 1) for name in run.speed[model]}
        told = ", ".join(f"{name} {rate:.1f}" for name, rate in steps.items())
        print(f"{WORKLOADS[model].title}, steps per second: {told}")
    results = Results([run])
    write_files(
        "lightning",
        options.output,
        lambda path: write_csv(results, path),
        lambda path: write_plot(results, path),
    )
    met = all_met(requirements(run))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
