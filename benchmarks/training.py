#!/usr/bin/env python
"""How fast training is: DistributedOptimizer against DistributedDataParallel and no communication.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks.training_rank`), shows progress and reports; see --help.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.processes import (  # noqa: E402
    Progress,
    follow,
    positive,
    torchrun_environments,
)
from benchmarks.promises import all_met, warn_if_busy, write_files  # noqa: E402
from benchmarks.training_report import (  # noqa: E402
    Results,
    Run,
    requirements,
    table,
    write_csv,
    write_plot,
)

CPU_MODELS = ["mlp", "cnn", "transformer", "resnet18"]
GPU_MODELS = ["resnet50", "gpt2"]
CONTENDERS = ["plain", "ours", "ddp"]
LOSS_STEPS = 50
MEMORY_RUNS = 3  # how full the heap becomes differs between runs

DESCRIPTION = """\
Compare a training step with hvd.DistributedOptimizer to one under DistributedDataParallel (Gloo or
NCCL; gradient_as_bucket_view, static_graph) and to one without communication, on this machine.

All contenders train models of their own in the same processes and take turns of a few steps, each
turn after a common barrier; OMP_NUM_THREADS is 1. A sample is a turn of the slowest rank, a result
the median of the samples. Efficiency is the step without communication over ours.
"""
EPILOG = """\
examples:
  python benchmarks/training.py                    2 ranks and 1, all four models, some minutes
  python benchmarks/training.py --np 2 --models mlp --seconds 30 --only-speed
  python benchmarks/training.py --np 4 8           where there are that many cores
  python benchmarks/training.py --np 4 8 --bind    the same with one core for each rank
  python benchmarks/training.py --np 4 8 --strong  or with the batch of two ranks in all
  python benchmarks/training.py --np 1 --device cuda
  python benchmarks/training.py --check            for scripts: status 1 when a promise is missed

Close other programs first: numbers of a busy machine mean little.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--np", type=int, nargs="+", default=[2, 1], metavar="N", help="numbers of ranks (2 1)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[*CPU_MODELS, *GPU_MODELS],
        metavar="MODEL",
        help=f"which to train (on a CPU {' '.join(CPU_MODELS)}; else {' '.join(GPU_MODELS)})",
    )
    parser.add_argument("--device", choices=["cpu", "cuda", "xpu"], default="cpu", help="(cpu)")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=20.0,
        metavar="S",
        help="time spent on each model and number of ranks (20); more gives steadier medians",
    )
    parser.add_argument(
        "--only-speed", action="store_true", help="skip the loss and memory sections"
    )
    parser.add_argument(
        "--force-reduction",
        action="store_true",
        help="reduce gradients also where there is one rank, as an elastic job does",
    )
    parser.add_argument(
        "--autotune",
        action="store_true",
        help="let Horovod tune itself first (HOROVOD_AUTOTUNE), until it has settled",
    )
    parser.add_argument(
        "--strong",
        action="store_true",
        help="share the batches of two ranks out among all: a job that is spread, not enlarged",
    )
    parser.add_argument(
        "--bind",
        action="store_true",
        help="give each rank one core, as schedulers do that count cores; otherwise DDP's threads "
        "run on those that no rank uses",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a promise is missed or not measured"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        metavar="DIR",
        help="where training.csv and training.png go (benchmarks/results)",
    )
    parser.add_argument(
        "--timeout", type=positive, default=900.0, metavar="S", help="give up after this long (900)"
    )
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    if options.bind and max(options.np) > cores:
        parser.error(f"--bind: {max(options.np)} ranks need as many cores, and there are {cores}")
    options.models = options.models or (CPU_MODELS if options.device == "cpu" else GPU_MODELS)
    return options


def measure(
    section: str,
    size: int,
    contenders: list[str],
    options: argparse.Namespace,
    progress: Progress,
) -> dict[str, Any]:
    """Let `size` ranks do one section for all models; what rank 0 collected."""
    with tempfile.TemporaryDirectory(prefix="horovod-benchmark-") as folder:
        plan = {
            "section": section,
            "models": options.models,
            "contenders": contenders,
            "device": options.device,
            "seconds": options.seconds,
            "steps": LOSS_STEPS,
            "strong": options.strong,
            "bind": options.bind,
            "result": f"{folder}/result.json",
        }
        program = [sys.executable, str(ROOT / "benchmarks" / "training_rank.py"), json.dumps(plan)]
        knobs = {"HOROVOD_ELASTIC": "1"} if options.force_reduction else {}
        if options.autotune:
            knobs["HOROVOD_AUTOTUNE"] = "1"
        commands = [(program, environ | knobs) for environ in torchrun_environments(size)]
        follow(
            commands,
            Path(folder) / "output",
            options.timeout,
            lambda model: progress.advance(f"{size} ranks, {section}, {model} done"),
        )
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
        return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    sections = 1 if options.only_speed else 2 + MEMORY_RUNS * len(CONTENDERS)
    progress = Progress(len(options.np) * len(options.models) * sections)
    results = Results()
    for size in options.np:
        progress.show(f"{size} ranks")
        speed = measure("speed", size, CONTENDERS, options, progress)
        run = Run(size, speed, bound=options.bind)
        if not options.only_speed:
            run.losses = measure("losses", size, CONTENDERS, options, progress)
            for contender in CONTENDERS:
                several = [
                    measure("memory", size, [contender], options, progress)
                    for _ in range(MEMORY_RUNS)
                ]
                for model in options.models:
                    peak = median(max(found[model]) for found in several)
                    run.memory.setdefault(model, {})[contender] = peak
        results.runs.append(run)
        progress.clear()
        print(f"\n{table(run, options.device)}\n", flush=True)

    write_files(
        "training",
        options.output,
        lambda path: write_csv(results, path),
        lambda path: write_plot(results, path),
    )
    met = all_met(requirements(results, options.device))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
