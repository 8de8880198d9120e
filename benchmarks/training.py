#!/usr/bin/env python
"""How fast training is: DistributedOptimizer against DistributedDataParallel and no communication.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks.training_rank`), shows progress and reports; see --help.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.processes import (  # noqa: E402
    Commands,
    Progress,
    positive,
    torchrun_environments,
)
from benchmarks.promises import add_options, all_met, warn_if_busy, write_files  # noqa: E402
from benchmarks.training_jobs import COMPARED, Jobs, heap_variables  # noqa: E402
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
PAIRS = [("plain", "ours"), ("ddp", "ours")]  # whose ratios we want to know
MEMORY_RUNS = 3  # how full the heap becomes differs between runs

DESCRIPTION = """\
Compare a training step with hvd.DistributedOptimizer to one under DistributedDataParallel (Gloo or
NCCL; gradient_as_bucket_view, static_graph) and to one without communication, on this machine.

Each contender has processes of its own, as when you run it. They take turns of a few steps, while
the others sleep; OMP_NUM_THREADS is 1. A sample is a turn of the slowest rank. A ratio is taken of
turns that follow each other, and its median is the result. Efficiency is the step of a program
without communication over ours.

Losses and peak memory are those of further processes, which for memory have all loaded both
libraries: it is about what training needs.
"""
EPILOG = """\
examples:
  python benchmarks/training.py                    2 ranks and 1, all four models, some minutes
  python benchmarks/training.py --np 2 --models mlp --seconds 30 --only-speed
  taskset -c 2,3 python benchmarks/training.py     two cores of a larger machine
  python benchmarks/training.py --np 4 8           where there are that many cores
  python benchmarks/training.py --np 4 8 --bind    the same with one core for each rank
  python benchmarks/training.py --np 4 8 --strong  or with the batch of two ranks in all
  python benchmarks/training.py --np 2 --same-heap --only-speed
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
    add_common(parser, "training")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    if options.bind and max(options.np) > cores:
        parser.error(f"--bind: {max(options.np)} ranks need as many cores, and there are {cores}")
    options.models = options.models or (CPU_MODELS if options.device == "cpu" else GPU_MODELS)
    return options


def add_common(parser: argparse.ArgumentParser, name: str) -> None:
    """The options of every benchmark that has contenders train by turns."""
    parser.add_argument(
        "--seconds",
        type=positive,
        default=120.0,
        metavar="S",
        help="most time spent on each model and number of ranks (120); less where the machine is "
        "so quiet that the ratios are known to 1.5 %% before",
    )
    parser.add_argument(
        "--same-heap",
        action="store_true",
        help="let all contenders keep freed memory the way that horovodrun and hvd.init() do, by "
        "variables of the allocators: what is left is the difference that communication makes",
    )
    add_options(parser, name)
    parser.add_argument(
        "--timeout", type=positive, default=900.0, metavar="S", help="give up after this long (900)"
    )


def jobs(size: int, options: argparse.Namespace, progress: Progress) -> Jobs:
    """What starts jobs of `size` ranks as the options say."""

    def place(program: list[str], more: Mapping[str, str]) -> Commands:
        return [(program, {**environ, **more}) for environ in torchrun_environments(size)]

    def knobs(contender: str) -> dict[str, str]:
        chosen = {"HOROVOD_ELASTIC": "1"} if options.force_reduction else {}
        if options.autotune:
            chosen["HOROVOD_AUTOTUNE"] = "1"
        return chosen | heap_variables(contender, options.same_heap)

    return Jobs(
        place,
        {"device": options.device, "strong": options.strong, "bind": options.bind},
        options.seconds,
        options.timeout,
        lambda what: progress.advance(f"{size} ranks, {what}"),
        knobs=knobs,
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    several = [size for size in options.np if size > 1 and not options.only_speed]
    more = len(COMPARED) + MEMORY_RUNS * len(CONTENDERS)
    progress = Progress(len(options.models) * (len(options.np) + len(several) * more))
    results = Results()
    for size in options.np:
        progress.show(f"{size} ranks")
        bench = jobs(size, options, progress)
        speed = {model: bench.speed(model, CONTENDERS, PAIRS) for model in options.models}
        run = Run(size, speed)
        run.bound = options.bind
        if size in several:
            for model in options.models:
                run.losses[model] = bench.losses(model)
                run.memory[model] = {
                    one: median(
                        peak
                        for _ in range(MEMORY_RUNS)
                        for peak in bench.found("memory", model, one)
                    )
                    for one in CONTENDERS
                }
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
