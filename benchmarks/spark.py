#!/usr/bin/env python
"""How fast Horovod on Spark is, against what else one would take there.

    python benchmarks/spark.py                 # everything
    python benchmarks/spark.py --only start

- start: from the call of ``horovod.spark.run`` with an empty function on 2 executors until it
  returns, against ``TorchDistributor.run`` of the same, in the same session, taking turns

``--check`` makes the exit status say whether the promises hold: no slower than TorchDistributor.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
# Measure this checkout, whatever else is installed; and `tensorflow` is not the file beside this.
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

from benchmarks.promises import Requirement, all_met, warn_if_busy  # noqa: E402
from benchmarks.turns import ratios  # noqa: E402

EXECUTORS = 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (9)")
    parser.add_argument("--check", action="store_true", help="fail if a promise does not hold")
    return parser.parse_args(arguments)


def make_session() -> object:
    """Executors are processes of their own, with one slot each."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local-cluster[{EXECUTORS},1,1024]")
    builder = builder.config("spark.ui.enabled", "false").appName("benchmark")
    return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()


def nothing() -> None:
    """What both start."""


def start(options: argparse.Namespace) -> Iterator[Requirement]:
    """An empty function on all executors."""
    import logging

    from pyspark.ml.torch.distributor import TorchDistributor

    import horovod.spark

    logging.getLogger("TorchDistributor").setLevel(logging.ERROR)
    distributor = TorchDistributor(num_processes=EXECUTORS, local_mode=False, use_gpu=False)
    contenders: dict[str, Callable[[], object]] = {
        "horovod.spark.run": lambda: horovod.spark.run(nothing, num_proc=EXECUTORS, verbose=0),
        "TorchDistributor.run": lambda: distributor.run(nothing),
    }
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for turn in range(options.rounds + 1):
        for name in order:
            begin = time.perf_counter()
            contenders[name]()
            if turn:  # the first fills caches, and starts Spark's Python workers
                samples[name].append(time.perf_counter() - begin)
        order.reverse()
    print(f"\nAn empty function on {EXECUTORS} executors, {options.rounds} turns each:")
    for name, values in samples.items():
        print(f"  {name:21} {median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    found = median(ratios(samples, "TorchDistributor.run", "horovod.spark.run"))
    print(f"  TorchDistributor.run / horovod.spark.run: {found:.2f}")
    yield Requirement("starts no slower than TorchDistributor", found >= 1.0, f"{found:.2f}x")


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Requirement]]] = {"start": start}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    make_session()
    requirements = [found for name in options.only for found in SECTIONS[name](options)]
    met = all_met(requirements)
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
