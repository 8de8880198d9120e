#!/usr/bin/env python
"""How fast a compiled step is with Horovod, against DDP with the same torch.compile.

Run by people. This process starts the ranks (`benchmarks.compile_rank`), tells them whose turn it
is, and reports; see --help.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.gpus import Gpus, add_mps_option, gpus_for  # noqa: E402
from benchmarks.processes import (  # noqa: E402
    Commands,
    Group,
    group,
    limit,
    positive,
    torchrun_environments,
)
from benchmarks.promises import Requirement, aligned, all_met, warn_if_busy  # noqa: E402
from benchmarks.training_jobs import heap_variables  # noqa: E402
from benchmarks.turns import HEAD_START, Samples, interval, race, ratios  # noqa: E402

MODELS = {"cpu": ["mlp", "transformer"], "cuda": ["mlp", "gpt"]}
LIBRARIES = ["ours", "ddp", "plain"]
CONTENDERS = [*LIBRARIES, *(f"{library} eager" for library in LIBRARIES)]
PAIRS = [("ddp", "ours"), ("plain", "ours"), ("ddp eager", "ours eager")]
OPERATORS = ["in place", "in place eager", "new", "new eager", "nothing", "entry"]
HOW = ["model", "step", "optimizer", "compiled autograd", "reduce-overhead"]
WANTED = 1.0  # times as fast as DDP with the same torch.compile
MOST = 15.0  # microseconds that the operator may take beside the eager call

DESCRIPTION = """\
Compare a training step with hvd.DistributedOptimizer to one with DistributedDataParallel and to one
without communication, each under torch.compile and as it is, on ranks of this machine. Then an
allreduce of 4 bytes in compiled code to the same call outside of it, and how many graphs
torch.compile makes of a step, with Horovod and without.

Each library has processes of its own, as when you run it, in which the compiled and the eager step
live; all take turns. Ratios are of turns that follow each other: the median, with the interval that
has it 19 times out of 20.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--device", choices=list(MODELS), default="cpu")
    parser.add_argument("--models", nargs="+", help="of benchmarks/training_models.py")
    parser.add_argument(
        "--compiled",
        choices=["step", "model"],
        default="step",
        help="what torch.compile gets: the whole step (default), or the model alone",
    )
    parser.add_argument(
        "--seconds", type=positive, default=60.0, metavar="S", help="time for each model (60)"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only-graphs", action="store_true", help="count graphs, measure nothing")
    only.add_argument("--only-operator", action="store_true", help="measure the operator alone")
    only.add_argument("--only-steps", action="store_true", help="measure steps alone")
    parser.add_argument(
        "--timeout", type=positive, default=1800.0, metavar="S", help="give up after (1800)"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a promise is missed or not measured"
    )
    add_mps_option(parser)
    options = parser.parse_args(arguments)
    options.models = options.models or MODELS[options.device]
    return options


def commands(
    library: str, model: str, options: argparse.Namespace, gpus: Gpus, operator: bool
) -> Commands:
    """Return the ranks of one library's job."""
    is_timed = not (options.only_graphs or options.only_operator)
    plan = {
        "library": library,
        "model": model,
        "device": options.device,
        "compiled": options.compiled,
        "contenders": [library, f"{library} eager"] if is_timed else [],
        "operator": operator and library == "ours",
    }
    program = [sys.executable, "-m", "benchmarks.compile_rank", json.dumps(plan)]
    heap = heap_variables("ours", same_heap=True)
    return [
        (program, {**environ, **gpus.variables(rank, options.np), **heap})
        for rank, environ in enumerate(torchrun_environments(options.np))
    ]


@contextmanager
def jobs_of(
    libraries: list[str],
    model: str,
    options: argparse.Namespace,
    gpus: Gpus,
    operator: bool,
    folder: str,
) -> Iterator[dict[str, Group]]:
    """Start a job for each library, side by side, and end them with the block."""
    with ExitStack() as running:
        jobs = {
            library: running.enter_context(
                group(
                    commands(library, model, options, gpus, operator),
                    Path(folder, f"{model}, {library}"),
                    ready=False,
                )
            )
            for library in libraries
        }
        for job in jobs.values():
            job.await_ready()
        yield jobs


def turns(
    jobs: dict[str, Group], section: str, names: list[str], seconds: float
) -> tuple[Samples, dict[str, float]]:
    """Let contenders take turns, each on all ranks of its library's job.

    The operators are in our job.

    Returns:
        The times of the slowest rank, and the median of the processor time of an average rank.
    """
    used: Samples = {name: [] for name in names}

    def turn(name: str) -> float:
        start = time.monotonic() + HEAD_START
        job = jobs[name.partition(" ")[0] if section == "turn" else "ours"]
        answers = job.ask({"section": section, "name": name, "start": start})
        used[name].append(mean(processor for _, processor in answers))
        return max(elapsed for elapsed, _ in answers)

    pairs = PAIRS if section == "turn" else [("in place", "in place eager"), ("new", "new eager")]
    samples = race({name: (lambda name=name: turn(name)) for name in names}, pairs, seconds)
    return samples, {name: median(values) for name, values in used.items()}


def show_steps(title: str, samples: Samples, used: dict[str, float]) -> float:
    """Print milliseconds, ratios and exposed communication; return the ratio to compiled DDP."""
    rows = [["", "compiled", "eager"]]
    for library in LIBRARIES:
        times = samples[library], samples[f"{library} eager"]
        rows.append([library, *(f"{median(values):.2f} ms" for values in times)])
    for library in ("ours", "ddp"):
        exposed = [
            median(
                a - b for a, b in zip(samples[library + end], samples["plain" + end], strict=True)
            )
            for end in ("", " eager")
        ]
        rows.append([f"exposed, {library}", *(f"{value:.2f} ms" for value in exposed)])
    for library in LIBRARIES:
        pair = used[library], used[f"{library} eager"]
        rows.append([f"processor, {library}", *(f"{value:.2f} ms" for value in pair)])
    print(f"\n{title}\n" + "\n".join(aligned(rows)))
    for over, under in PAIRS:
        found = ratios(samples, over, under)
        low, high = interval(found)
        print(
            f"  {over} / {under}: {median(found):.3f} ({low:.3f} to {high:.3f}), {len(found)} turns"
        )
    return median(ratios(samples, "ddp", "ours"))


def show_operator(samples: Samples) -> float:
    """Print microseconds; return what the operator takes more than the eager call, at most."""
    print("\nallreduce of 4 bytes, microseconds: in compiled code, eager, difference (median)")
    differences = []
    for form in ("in place", "new"):
        pairs = list(zip(samples[form], samples[f"{form} eager"], strict=True))
        differences.append(median(a - b for a, b in pairs))
        compiled, eager = (median(values) for values in zip(*pairs, strict=True))
        print(f"  {form:8}  {compiled:7.1f}  {eager:7.1f}  {differences[-1]:7.1f}")
    nothing = median(samples["nothing"])
    print(
        f"  an operator with the same arguments that does nothing, in compiled code: {nothing:.1f}"
    )
    print(f"  entering a compiled function that does nothing: {median(samples['entry']):.1f}")
    return max(differences)


def show_graphs(ranks: Group) -> bool:
    """Print how many graphs and breaks there are; return whether torch alone has as many."""
    rows = [["compiled", "torch alone", "with Horovod"]]
    is_equal = True
    for how in HOW:
        found = {}
        for library in ("plain", "ours"):
            found[library] = ranks.ask({"section": "graphs", "library": library, "how": how})[0]
        is_equal = is_equal and all(
            mine <= alone for mine, alone in zip(found["ours"], found["plain"], strict=True)
        )
        texts = [f"{graphs}, {breaks} breaks" for graphs, breaks in found.values()]
        rows.append([how, *texts])
    print("\ngraphs of a step\n" + "\n".join(aligned(rows)), flush=True)
    return is_equal


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    kept: list[Requirement] = []
    with (
        gpus_for(options.device, options.np, not options.no_mps) as gpus,
        TemporaryDirectory(prefix="horovod-benchmark-") as folder,
        limit(options.timeout),
    ):
        for number, model in enumerate(options.models):
            first = number == 0
            operator = first and not (options.only_graphs or options.only_steps)
            is_timed = not (options.only_graphs or options.only_operator)
            libraries = LIBRARIES if is_timed else ["ours"]
            with jobs_of(libraries, model, options, gpus, operator, folder) as jobs:
                if is_timed:
                    title = f"{model}, {options.np} ranks, {options.device}, {options.compiled}"
                    ratio = show_steps(title, *turns(jobs, "turn", CONTENDERS, options.seconds))
                    text = f"{model}: {WANTED}x DDP with the same torch.compile"
                    kept.append(Requirement(text, ratio >= WANTED, f"{ratio:.2f}x"))
                if operator:
                    samples, _ = turns(jobs, "operator", OPERATORS, options.seconds / 4)
                    most = show_operator(samples)
                    text = f"the operator takes {MOST:g} microseconds at most beside the eager call"
                    kept.append(Requirement(text, most <= MOST, f"{most:.1f}"))
                if first and not (options.only_operator or options.only_steps):
                    text = "as many graphs and breaks as with torch alone"
                    is_met = show_graphs(jobs["ours"])
                    kept.append(Requirement(text, is_met, "yes" if is_met else "no"))
    met = all_met(kept)
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
