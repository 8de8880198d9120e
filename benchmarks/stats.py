#!/usr/bin/env python
"""What the statistics behind hvd.stats() cost: steps with counting against steps without.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks.stats_rank`) and reports; see --help.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.processes import positive, processes, torchrun_environments  # noqa: E402
from benchmarks.promises import Requirement, aligned, all_met, warn_if_busy  # noqa: E402
from benchmarks.training_models import WORKLOADS  # noqa: E402
from benchmarks.turns import Samples, interval, ratios  # noqa: E402

MOST = 0.005  # of a step
CPU_MODELS = ["mlp", "cnn", "transformer", "resnet18"]

DESCRIPTION = """\
Measure what the statistics behind hvd.stats(), which are always on, cost: training steps, and
allreduces of 1 KiB, with counting and without, on this machine.

Both are done by the same processes, which take turns of some steps and switch counting on and off
in between; OMP_NUM_THREADS is 1. A sample is a turn of the slowest rank, a ratio that of two turns
that follow each other; the result is the median with the interval that has it 19 times out of 20.
With --np 1 a rank reduces with nobody, and time is that of its thread on a core: other programs
disturb that least. What counting takes by itself is measured as well.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--np", type=int, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument(
        "--models", nargs="+", default=CPU_MODELS, choices=CPU_MODELS, help="what to train (all)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=30.0, help="of each measurement (30)", metavar="S"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a promise is missed or not measured"
    )
    return parser.parse_args(arguments)


def measure(size: int, names: list[str], seconds: float) -> dict[str, Samples]:
    command = [sys.executable, "-m", "benchmarks.stats_rank", str(seconds), *names]
    # An elastic job reduces also where it happens to have one rank.
    more = {"HOROVOD_ELASTIC": "1"} if size == 1 else {}
    commands = [(command, environ | more) for environ in torchrun_environments(size)]
    with processes(commands, stdout=subprocess.PIPE, cwd=ROOT) as ranks:
        output = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit(f"a rank failed: {[rank.returncode for rank in ranks]}")
    found: dict[str, Samples] = json.loads(output[0])
    return found


def rows(found: dict[str, Samples], alone: dict[str, float]) -> Iterator[list[str]]:
    yield ["", "step", "with / without", "95 %", "alone", "share of a step"]
    for name, samples in found.items():
        values, step = ratios(samples, "on", "off"), median(samples["off"])
        low, high = interval(values)
        cost = _cost(name, alone)
        yield [
            "allreduce of 1 KiB" if name == "allreduce" else WORKLOADS[name].title,
            f"{1e6 * step:.1f} us" if step < 1e-3 else f"{1e3 * step:.2f} ms",
            f"{median(values):.4f}",
            f"{low:.4f} to {high:.4f}",
            f"{1e6 * cost:.2f} us",
            f"{100 * cost / step:.3f} %",
        ]


def _cost(name: str, alone: dict[str, float]) -> float:
    """Of counting: an operation, and a step around it if there is one."""
    return alone["operation"] + (0.0 if name == "allreduce" else alone["step"])


def requirements(found: dict[str, Samples], alone: dict[str, float]) -> Iterator[Requirement]:
    for name, samples in found.items():
        if name != "allreduce":
            share = _cost(name, alone) / median(samples["off"])
            text = f"counting takes under {100 * MOST:g} % of a step ({WORKLOADS[name].title})"
            yield Requirement(text, share < MOST, f"{100 * share:.3f} %")
            low, _ = interval(ratios(samples, "on", "off"))
            text = f"and no more is seen in the time of the step ({WORKLOADS[name].title})"
            measured = low > -math.inf  # else there were too few turns
            met = low < 1 + MOST if measured else None
            yield Requirement(text, met, f"{100 * (low - 1):+.2f} % or more" if measured else "-")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    found = measure(options.np, ["allreduce", *options.models], options.seconds)
    alone: dict[str, float] = found.pop("alone")  # type: ignore[assignment]
    print(f"\n{options.np} ranks, counting against not counting\n")
    print("\n".join(aligned(list(rows(found, alone)))) + "\n")
    met = all_met(requirements(found, alone))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
