#!/usr/bin/env python
"""How fast `fit` is with Horovod, against TensorFlow's MultiWorkerMirroredStrategy and one rank.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks/tensorflow_rank.py`), tells them whose turn it is, and reports; see --help.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
# Measure this checkout, whatever else is installed; and not this folder, whose tensorflow.py (we)
# would be taken for TensorFlow.
sys.path[0] = str(ROOT)

from benchmarks.processes import (  # noqa: E402
    Commands,
    Group,
    Progress,
    environment,
    group,
    limit,
    positive,
    torchrun_environments,
)
from benchmarks.promises import all_met, warn_if_busy, write_files  # noqa: E402
from benchmarks.tensorflow_report import (  # noqa: E402
    CONTENDERS,
    MODELS,
    RANKS,
    Results,
    requirements,
    table,
    write_csv,
    write_plot,
)

LOSS_STEPS = 20  # of the first turn, whose losses are compared
STEPS = (10, 1000)  # in a turn, at least and at most
LEAST_ROUNDS = 5

DESCRIPTION = """\
Compare training steps of model.fit with hvd.DistributedOptimizer, with Keras 3 and with tf-keras
(Keras 2), to those under tf.distribute.MultiWorkerMirroredStrategy (its RING over gRPC) and to
steps without communication, on two ranks of this machine and on one.

fit of Keras 3 does not run under that strategy (it fails with "Attempt to convert a value
(PerReplica ...)"), so the strategy trains with tf-keras.

All train the same models, from the same start on the same data, with SGD and momentum. They need
different processes, which live from the beginning to the end and wait while it is not their turn.
A turn is one fit of about --turn seconds; a round is a turn of everybody, and each round begins
with another. The first steps of a turn are not measured. A sample is the mean step of a turn on
the slowest rank, a result the median of the samples. Efficiency is the rate over that of one rank
alone.
"""
EPILOG = """\
examples:
  python benchmarks/tensorflow.py                    both models, about four minutes
  python benchmarks/tensorflow.py --models mlp --seconds 30
  python benchmarks/tensorflow.py --check            for scripts: status 1 when a promise is missed

It needs tensorflow (or tensorflow-cpu) and tf-keras. Close other programs first: numbers of a busy
machine mean little.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=list(MODELS),
        metavar="MODEL",
        help=f"which to train ({' '.join(MODELS)})",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=90.0,
        metavar="S",
        help="time spent on each model (90), but at least five rounds; more gives steadier medians",
    )
    parser.add_argument(
        "--turn", type=positive, default=1.0, metavar="S", help="length of a turn, about (1)"
    )
    parser.add_argument(
        "--intra-op", type=int, default=1, metavar="N", help="TensorFlow's threads in an op (1)"
    )
    parser.add_argument(
        "--inter-op", type=int, default=2, metavar="N", help="TensorFlow's threads for ops (2)"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a promise is missed or not measured"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        metavar="DIR",
        help="where tensorflow.csv and tensorflow.png go (benchmarks/results)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=1800.0,
        metavar="S",
        help="give up after this long (1800)",
    )
    return parser.parse_args(arguments)


# -- ranks -----------------------------------------------------------------------------------------


def commands(name: str, options: argparse.Namespace) -> Commands:
    """The ranks of one job."""
    environs = strategy_environments() if name == "strategy" else torchrun_environments(RANKS)
    program = str(ROOT / "benchmarks" / "tensorflow_rank.py")
    threads = {"intra_op": options.intra_op, "inter_op": options.inter_op}
    made = []
    for rank, environ in enumerate(environs):
        plan = {"rank": rank, "strategy": name == "strategy", **threads}
        keras = {} if name == "keras3" else {"TF_USE_LEGACY_KERAS": "1"}
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
        made.append(([sys.executable, program, json.dumps(plan)], environ | keras | quiet))
    return made


def strategy_environments() -> list[dict[str, str]]:
    """What TensorFlow wants each worker of a cluster to know."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(RANKS)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        workers = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in sockets]
    return [
        environment(
            TF_CONFIG=json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
            )
        )
        for rank in range(RANKS)
    ]


# -- the race --------------------------------------------------------------------------------------


def race(
    model: str, groups: dict[str, Group], options: argparse.Namespace, progress: Progress
) -> Results:
    """Let all contenders train a model in turns."""
    results = Results(model, {name: [] for name in CONTENDERS})

    def turn(name: str, steps: int) -> list[dict[str, float]]:
        contender = CONTENDERS[name]
        order = {"model": model, "way": contender.way, "steps": steps}
        return groups[contender.group].ask(order, contender.ranks)

    slowest = 0.0
    for name in CONTENDERS:  # builds everything
        progress.show(f"{model}, first turn of {CONTENDERS[name].title}")
        answers = turn(name, LOSS_STEPS)
        results.losses[name] = fmean(answer["loss"] for answer in answers)
        slowest = max(slowest, *(answer["seconds"] for answer in answers))
    steps = min(max(STEPS[0], round(options.turn / slowest)), STEPS[1])
    order = list(CONTENDERS)
    began = time.monotonic()
    rounds = 0
    while rounds < LEAST_ROUNDS or time.monotonic() - began < options.seconds:
        for name in order:
            seconds = [answer["seconds"] for answer in turn(name, steps)]
            results.seconds[name].append(max(seconds))
        order.append(order.pop(0))
        rounds += 1
        progress.show(f"{model}, {rounds} rounds of {steps} steps")
    progress.advance(f"{model} done")
    return results


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    progress = Progress(len(options.models))
    results = []
    with ExitStack() as running:
        running.enter_context(limit(options.timeout))
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="horovod-benchmark-"))
        groups = {}
        for name in ("keras3", "tf_keras", "strategy"):
            progress.show(f"starting {name}")
            started = group(commands(name, options), Path(folder, name))
            groups[name] = running.enter_context(started)
        progress.clear()
        print(
            f"TensorFlow's threads in each rank: {options.intra_op} in an op, {options.inter_op} "
            "for ops; OMP_NUM_THREADS=1\n",
            flush=True,
        )
        for model in options.models:
            results.append(race(model, groups, options, progress))
            progress.clear()
            print(f"{table(results[-1])}\n", flush=True)
    write_files(
        "tensorflow",
        options.output,
        lambda path: write_csv(results, path),
        lambda path: write_plot(results, path),
    )
    met = all_met(requirements(results))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
