#!/usr/bin/env python
"""What local steps do to the quality of a model: a GPT on Python's own library, with equal tokens.

Run by people. This process starts the ranks (`benchmarks.local_quality_rank`), each on a host that
is only a name, and reports; see --help. The files that --json writes can be drawn again later:

    python benchmarks/local_quality.py --plot curves.svg first.json second.json
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.gpus import Gpus, add_mps_option, gpus_for  # noqa: E402
from benchmarks.local_quality_report import LABELS, Run, picture, table  # noqa: E402
from benchmarks.processes import JobFailed, follow, positive, torchrun_environments  # noqa: E402

CONTEXT = 256  # bytes of one text


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "results", nargs="*", type=Path, help="files of earlier runs: only show them, train nothing"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks of a job (2)")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a training (3000)")
    parser.add_argument("--layers", type=int, default=6, help="layers of the GPT (6)")
    parser.add_argument("--width", type=int, default=384, help="its width, heads of 64 (384)")
    parser.add_argument("--batch", type=int, default=16, help="texts of a rank's batch (16)")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"bytes of a text ({CONTEXT})")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's highest rate (0.001)")
    parser.add_argument("--local-steps", type=int, default=50, metavar="H")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--configurations", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="JOBS", help="trainings at the same time (1)"
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=3600.0,
        metavar="SECONDS",
        help="of one training; what it has found by then counts (3600)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the curves there")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves there")
    add_mps_option(parser)
    return parser.parse_args(arguments)


class Bench:
    """Trains each configuration with each seed, some of them at the same time."""

    def __init__(self, options: argparse.Namespace, gpus: Gpus, folder: Path) -> None:
        self._options = options
        self._gpus = gpus
        self._folder = folder
        self._is_stopped = False

    def runs(self) -> list[Run]:
        """What all trainings have found, those that failed or took too long included."""
        options = self._options
        jobs = [(name, seed) for seed in options.seeds for name in options.configurations]
        with ThreadPoolExecutor(options.parallel) as pool:
            try:
                list(pool.map(self._train, jobs))
            except BaseException:
                self._is_stopped = True
                pool.shutdown(cancel_futures=True)
                raise
        results = [self._result(*job) for job in jobs]
        return [json.loads(file.read_text()) for file in results if file.exists()]

    def _train(self, job: tuple[str, int]) -> None:
        configuration, seed = job
        options = self._options
        # Evaluated when all ranks have synchronised.
        evaluate = options.local_steps * max(1, options.steps // 20 // options.local_steps)
        plan: dict[str, Any] = {
            name: getattr(options, name)
            for name in ("device", "steps", "layers", "width", "context", "batch", "lr")
        }
        plan |= {
            "configuration": configuration,
            "seed": seed,
            "local_steps": options.local_steps,
            # Ordinary steps at first, about as large a part as in the paper that proposed DiLoCo.
            "warmup": options.steps // 4 // options.local_steps * options.local_steps,
            "evaluate": min(evaluate, options.steps),
            "result": str(self._result(configuration, seed)),
        }
        program = [sys.executable, "-m", "benchmarks.local_quality_rank", json.dumps(plan)]
        commands = [
            (program, {**environ, **self._gpus.variables(rank, options.np)})
            for rank, environ in enumerate(torchrun_environments(options.np, per_host=1))
        ]
        output = self._folder / f"{configuration}, seed {seed}"
        try:
            follow(commands, output, options.timeout, self._advance)
        except JobFailed as failure:
            print(failure, file=sys.stderr, flush=True)

    def _result(self, configuration: str, seed: int) -> Path:
        return self._folder / f"{configuration}-{seed}.json"

    def _advance(self, what: str) -> None:
        if self._is_stopped:
            raise JobFailed(f"{what}: stopped")
        print(what, flush=True)


def train_all(options: argparse.Namespace) -> list[Run]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    with (
        tempfile.TemporaryDirectory() as folder,
        gpus_for(options.device, options.np * options.parallel, not options.no_mps) as gpus,
    ):
        return Bench(options, gpus, Path(folder)).runs()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.results:
        runs = [run for file in options.results for run in json.loads(file.read_text())["runs"]]
    else:
        runs = train_all(options)
    if options.json is not None and not options.results:
        shown = {name: value for name, value in vars(options).items() if name not in ("json",)}
        content = {"options": {k: str(v) for k, v in shown.items()}, "runs": runs}
        options.json.write_text(json.dumps(content) + "\n")
    print(f"\n{table(runs)}\n")
    if options.plot is not None:
        options.plot.write_text(picture(runs))
    wanted = len(options.seeds) * len(options.configurations)
    is_complete = options.results or (
        len(runs) == wanted and all(run["curve"][-1][0] == options.steps for run in runs)
    )
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
