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
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.processes import (  # noqa: E402
    Commands,
    Progress,
    follow,
    group,
    limit,
    positive,
    torchrun_environments,
)
from benchmarks.promises import all_met, warn_if_busy, write_files  # noqa: E402
from benchmarks.training_report import (  # noqa: E402
    LABELS,
    Results,
    Run,
    doubt,
    ratios,
    requirements,
    table,
    write_csv,
    write_plot,
)
from horovod.engine.heap import KEPT, OWN_MAPPING  # noqa: E402

CPU_MODELS = ["mlp", "cnn", "transformer", "resnet18"]
GPU_MODELS = ["resnet50", "gpt2"]
CONTENDERS = ["plain", "ours", "ddp"]
COMPARED = ["ours", "ddp"]  # their losses, with each other
LOSS_STEPS = 50
LEAST_ROUNDS = 8  # turns of each contender
PRECISE = 0.015  # doubt about a ratio with which we are content, over the ratio
HEAD_START = 0.005  # seconds until a turn begins: all ranks are awake by then
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
    add_common(parser)
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
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    if options.bind and max(options.np) > cores:
        parser.error(f"--bind: {max(options.np)} ranks need as many cores, and there are {cores}")
    options.models = options.models or (CPU_MODELS if options.device == "cpu" else GPU_MODELS)
    return options


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of all benchmarks of training."""
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
        help="let all contenders keep freed memory the way that hvd.init() does, by variables of "
        "glibc: what is left is the difference that communication makes",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a promise is missed or not measured"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        metavar="DIR",
        help="where the CSV file and the plot go (benchmarks/results)",
    )
    parser.add_argument(
        "--timeout", type=positive, default=900.0, metavar="S", help="give up after this long (900)"
    )


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="horovod-benchmark-")


def is_precise(samples: dict[str, list[float]]) -> bool:
    """Whether the ratios of these turns are known well enough."""
    return all(
        doubt(found := ratios(samples, other, "ours")) <= PRECISE * median(found)
        for other in CONTENDERS
        if other != "ours"
    )


class Bench:
    """Starts ranks as the options say."""

    module = "benchmarks.training_rank"  # what a rank runs

    def __init__(self, options: argparse.Namespace, progress: Progress) -> None:
        self.options = options
        self.progress = progress

    def speed(self, size: int, model: str) -> dict[str, list[float]]:
        """Milliseconds per step of each contender: a sample a turn, that of the slowest rank."""
        samples: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        order, groups = list(CONTENDERS), {}
        with ExitStack() as running:
            running.enter_context(limit(self.options.timeout))
            folder = running.enter_context(temporary_folder())
            for name in CONTENDERS:  # one after the other: who tunes itself needs quiet
                commands = self._commands("speed", size, model, name)
                output = Path(folder, f"speed of {model}, {LABELS[name]}")
                groups[name] = running.enter_context(group(commands, output))
            began, enough = time.monotonic(), False
            while not enough:
                for name in order:
                    start = time.monotonic() + HEAD_START  # the same for all ranks
                    samples[name].append(max(groups[name].ask(start)))
                order.append(order.pop(0))
                late = time.monotonic() - began > self.options.seconds
                enough = len(samples["ours"]) >= LEAST_ROUNDS and (late or is_precise(samples))
        self.progress.advance(f"{size} ranks, speed, {model} done")
        return samples

    def found(self, section: str, size: int, model: str, contender: str) -> list[Any]:
        """What each rank found in another section."""
        with temporary_folder() as folder:
            result = Path(folder, "result")
            commands = self._commands(section, size, model, contender, str(result))
            output = Path(folder, f"{section} of {model}, {LABELS[contender]}")
            follow(commands, output, self.options.timeout, lambda _: None)
            found = [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(size)]
        self.progress.advance(f"{size} ranks, {section}, {model}, {LABELS[contender]} done")
        return found

    def _commands(
        self, section: str, size: int, model: str, contender: str, result: str = ""
    ) -> Commands:
        options = self.options
        plan = {
            "section": section,
            "model": model,
            "contender": contender,
            "device": options.device,
            "steps": LOSS_STEPS,
            "strong": options.strong,
            "bind": options.bind,
            "result": result,
        }
        program = [sys.executable, "-m", self.module, json.dumps(plan)]
        knobs = {"HOROVOD_ELASTIC": "1"} if options.force_reduction else {}
        if options.autotune:
            knobs["HOROVOD_AUTOTUNE"] = "1"
        if options.same_heap and contender != "ours":
            knobs["MALLOC_MMAP_THRESHOLD_"] = str(OWN_MAPPING)
            knobs["MALLOC_TRIM_THRESHOLD_"] = str(KEPT)
        return [(program, environ | knobs) for environ in torchrun_environments(size)]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    several = [size for size in options.np if size > 1 and not options.only_speed]
    more = len(COMPARED) + MEMORY_RUNS * len(CONTENDERS)
    progress = Progress(len(options.models) * (len(options.np) + len(several) * more))
    bench = Bench(options, progress)
    results = Results()
    for size in options.np:
        progress.show(f"{size} ranks")
        run = Run(size, {model: bench.speed(size, model) for model in options.models})
        run.bound = options.bind
        if size in several:
            for model in options.models:
                run.losses[model] = {
                    one: bench.found("losses", size, model, one) for one in COMPARED
                }
                run.memory[model] = {
                    one: median(
                        peak
                        for _ in range(MEMORY_RUNS)
                        for peak in bench.found("memory", size, model, one)
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
