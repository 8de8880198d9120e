#!/usr/bin/env python
"""Horovod on Ray: how fast it starts, trains and recovers.

    python benchmarks/ray.py          # in an environment with Ray; about ten minutes
    python benchmarks/ray.py --rounds 3 --only recovery

- start: from the call of ``RayExecutor.start()`` to the first finished allreduce on 4 workers,
  against Ray Train's TorchTrainer, from ``fit()`` to its first one
- training: a step of the MLP on two ranks through RayExecutor, against horovodrun
- recovery: from SIGKILL of one of three workers to the next step of the others

Contenders take turns in one run; medians, and the median of the turns' ratios. OMP_NUM_THREADS is
1. ``--check`` makes the exit status say whether the promises hold.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Measure this checkout, whatever else is installed; and `ray` is not this very file.
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

from benchmarks.processes import environment  # noqa: E402
from benchmarks.promises import Requirement, all_met, times_text, warn_if_busy  # noqa: E402

SECTIONS = ("start", "training", "recovery")
WORKERS = 4
WITHIN = 1.03
RECOVERY_SECONDS = 3.0

Found = dict[str, list[float]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (7)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of a turn (300)")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="measure this alone")
    parser.add_argument("--check", action="store_true", help="fail if a promise does not hold")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(arguments)


def measure_start(rounds: int) -> Found:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from benchmarks import ray_rank
    from horovod.ray import RayExecutor

    def ours() -> float:
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), num_workers=WORKERS)
        begin = time.time()
        executor.start()
        finished = max(executor.run(ray_rank.first_allreduce))
        executor.shutdown()
        return finished - begin

    def theirs() -> float:
        with tempfile.TemporaryDirectory() as folder:
            trainer = TorchTrainer(
                ray_rank.first_torch_allreduce,
                train_loop_config={"folder": folder},
                scaling_config=ScalingConfig(num_workers=WORKERS),
                run_config=RunConfig(storage_path=f"{folder}/runs"),
            )
            begin = time.time()
            trainer.fit()
            ends = [float(Path(folder, f"{rank}").read_text()) for rank in range(WORKERS)]
        return max(ends) - begin

    found: Found = {"ours": [], "TorchTrainer": []}
    for turn in range(rounds + 1):
        for name, contender in (("ours", ours), ("TorchTrainer", theirs)):
            seconds = contender()
            if turn:  # the first only fills the caches
                found[name].append(seconds)
    return found


def measure_training(rounds: int, steps: int) -> Found:
    from benchmarks import ray_rank
    from horovod.ray import RayExecutor

    command = [sys.executable, "-m", "horovod.runner", "-np", "2", sys.executable]
    command += ["-m", "benchmarks.ray_rank", str(steps)]
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), num_workers=2)
    executor.start()
    executor.run(ray_rank.train, args=[1])
    found: Found = {"ours": [], "horovodrun": []}
    for _ in range(rounds):
        found["ours"].append(executor.run(ray_rank.train, args=[steps])[0])
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, check=True, capture_output=True, text=True
        )
        found["horovodrun"].append(float(re.findall(r"ms ([\d.]+)", done.stdout)[0]))
    executor.shutdown()
    return found


def measure_recovery(rounds: int) -> Found:
    from benchmarks import ray_rank
    from horovod.ray import RayExecutor

    killed: list[float] = []
    recovered: list[float] = []

    def watch(message: dict[str, Any]) -> None:
        if message["changes"] == 2 * len(killed) + 1 and message["size"] == 3:
            if len(killed) < rounds:
                killed.append(time.time())
                os.kill(message["pid"], signal.SIGKILL)
        elif message["changes"] == 2 * len(killed) and len(recovered) < len(killed):
            recovered.append(message["time"] - killed[-1])

    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=300),
        min_workers=2,
        max_workers=3,
        cooldown_range=(1, 2),
    )
    executor.settings.verbose = 0
    executor.start()
    executor.run(ray_rank.train_elastic, args=[rounds], callbacks=[watch])
    return {"recovery": recovered}


def ratio(found: Found, over: str) -> float | None:
    turns = zip(found["ours"], found[over], strict=True) if over in found else ()
    values = [theirs / ours for ours, theirs in turns]
    return median(values) if values else None


def requirements(results: dict[str, Found]) -> Iterator[Requirement]:
    start = ratio(results.get("start", {}), "TorchTrainer")
    yield Requirement(
        "start to first allreduce on 4 workers: no slower than TorchTrainer",
        None if start is None else start >= 1.0,
        f"{times_text(start)} its speed",
    )
    training = ratio(results.get("training", {}), "horovodrun")
    yield Requirement(
        "training through RayExecutor: within 3 % of horovodrun",
        None if training is None else training >= 1 / WITHIN,
        f"{times_text(training)} its speed",
    )
    recovery = results.get("recovery", {}).get("recovery")
    yield Requirement(
        f"SIGKILL to the survivors' next step: under {RECOVERY_SECONDS:g} s",
        None if not recovery else median(recovery) < RECOVERY_SECONDS,
        "-" if not recovery else f"{median(recovery):.2f} s",
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    folder = tempfile.mkdtemp(prefix="hvd", dir="/tmp")  # short: Ray's sockets are in it
    os.environ.update(
        RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=folder, **environment()
    )
    import ray

    ray.init(num_cpus=WORKERS + 2, include_dashboard=False, log_to_driver=False)
    try:
        results: dict[str, Found] = {}
        for section in options.only or SECTIONS:
            if section == "start":
                results[section] = measure_start(options.rounds)
            elif section == "training":
                results[section] = measure_training(options.rounds, options.steps)
            else:
                results[section] = measure_recovery(options.rounds)
            unit = "ms" if section == "training" else "s"
            for name, values in results[section].items():
                print(
                    f"{section:9} {name:12} {median(values):7.2f} {unit}  "
                    f"({min(values):.2f} to {max(values):.2f}, {len(values)} turns)",
                    flush=True,
                )
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    write_csv(results, options.output)
    met = all_met(requirements(results))
    return 1 if options.check and not met else 0


def write_csv(results: dict[str, Found], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "ray.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["section", "contender", "turn", "value"])
        for section, found in results.items():
            for name, values in found.items():
                rows.writerows([section, name, turn, value] for turn, value in enumerate(values))
    print(f"Written: {folder / 'ray.csv'}")


if __name__ == "__main__":
    sys.exit(main())
