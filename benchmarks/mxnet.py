#!/usr/bin/env python
"""How fast an MXNet step is with Horovod, against MXNet's ``dist_sync`` and without communication.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks/mxnet_rank.py`), tells them whose turn it is, and reports; see --help.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
# Measure this checkout, whatever else is installed; and not this folder, whose mxnet.py (we) would
# be taken for MXNet.
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

from benchmarks.processes import (  # noqa: E402
    Commands,
    Progress,
    environment,
    free_port,
    group,
    limit,
    positive,
    processes,
    torchrun_environments,
)
from benchmarks.promises import (  # noqa: E402
    Requirement,
    add_options,
    aligned,
    all_met,
    figure,
    warn_if_busy,
    write_files,
)
from benchmarks.turns import Samples, interval, race, ratios  # noqa: E402

RANKS = 2
CONTENDERS = {
    "ours": "horovod.mxnet",
    "dist_sync": "MXNet's kvstore dist_sync, one server",
    "plain": "no communication",
}
PAIRS = [("dist_sync", "ours"), ("plain", "ours")]
WANTED = 1.0  # times as fast as dist_sync
CLOSE = 1e-3  # the most that losses may differ, relatively

DESCRIPTION = """\
Compare a Gluon training step with hvd.DistributedTrainer to one with MXNet's own parameter server
(kvstore="dist_sync": a scheduler, a server, two workers) and to one without communication, on two
ranks of this machine: an MLP with 1.9 M parameters.

All train the same model, from the same start on the same data, with SGD and momentum. Each has
processes of its own, which wait while it is not their turn; OMP_NUM_THREADS is 1. Ratios are of
turns that follow each other.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=positive, default=60.0, metavar="S", help="time to measure (60)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of a turn (20)")
    parser.add_argument(
        "--timeout", type=positive, default=1200.0, metavar="S", help="give up after (1200)"
    )
    add_options(parser, "mxnet")
    return parser.parse_args(arguments)


def command(contender: str, rank: int, steps: int) -> list[str]:
    plan = {"contender": contender, "rank": rank, "steps": steps}
    return [sys.executable, "-m", "benchmarks.mxnet_rank", json.dumps(plan)]


def parameter_server(steps: int) -> tuple[Commands, Commands]:
    """The scheduler and the server of a kvstore, and its workers."""
    shared = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_WORKER": str(RANKS),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NODE_HOST": "127.0.0.1",
    }

    def of_role(role: str, rank: int = 0) -> tuple[list[str], dict[str, str]]:
        return command("dist_sync", rank, steps), environment(DMLC_ROLE=role, **shared)

    servers = [of_role("scheduler"), of_role("server")]
    return servers, [of_role("worker", rank) for rank in range(RANKS)]


def measure(options: argparse.Namespace, progress: Progress) -> tuple[Samples, dict[str, float]]:
    """Seconds per step of every contender's turns, and the loss after its first turn."""
    with ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="horovod-benchmark-"))
        groups, losses = {}, {}
        for name in CONTENDERS:
            progress.show(f"starting {CONTENDERS[name]}")
            if name == "dist_sync":
                servers, made = parameter_server(options.steps)
                files = [Path(folder, role) for role in ("scheduler", "server")]
                running.enter_context(processes(servers, files, stdout=2))
            else:
                made = [
                    (command(name, rank, options.steps), environ)
                    for rank, environ in enumerate(torchrun_environments(RANKS))
                ]
            groups[name] = running.enter_context(group(made, Path(folder, name)))
            losses[name] = sum(a["loss"] for a in groups[name].ask("train")) / RANKS
        turns = {
            name: (lambda members=members: max(a["seconds"] for a in members.ask("train")))
            for name, members in groups.items()
        }
        progress.show("taking turns")
        return race(turns, PAIRS, options.seconds), losses


def table(samples: Samples) -> str:
    rows = [("", "ms/step", "steps/s", "horovod.mxnet is")]
    for name, title in CONTENDERS.items():
        step, ratio = median(samples[name]), ""
        if name != "ours":
            found = ratios(samples, name, "ours")
            low, high = interval(found)
            ratio = f"{median(found):.2f}x as fast ({low:.2f} to {high:.2f})"
        rows.append((title, f"{1000 * step:.2f}", f"{1 / step:.1f}", ratio))
    rounds = len(samples["ours"])
    return "\n".join([f"MLP, 1.9 M parameters, {RANKS} ranks, {rounds} rounds", *aligned(rows)])


def requirements(samples: Samples, losses: dict[str, float]) -> Iterator[Requirement]:
    ratio = median(ratios(samples, "dist_sync", "ours"))
    yield Requirement("faster than dist_sync", ratio > WANTED, f"{ratio:.2f}x")
    ours, theirs = losses["ours"], losses["dist_sync"]
    same = abs(ours - theirs) <= CLOSE * abs(theirs)
    yield Requirement("the same loss", same, f"{ours:.6f} and {theirs:.6f}")


def write_csv(samples: Samples, path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["contender", "round", "seconds_per_step"])
        for name, seconds in samples.items():
            rows.writerows([name, number, each] for number, each in enumerate(seconds))


def write_plot(samples: Samples, path: Path) -> None:
    with figure(path, 1, 1) as panels:
        panels[0][0].bar(list(CONTENDERS), [1 / median(samples[name]) for name in CONTENDERS])
        panels[0][0].set_title("MLP, 1.9 M parameters, two ranks")
        panels[0][0].set_ylabel("steps per second")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    progress = Progress(1)
    with limit(options.timeout):
        samples, losses = measure(options, progress)
    progress.clear()
    print(f"\n{table(samples)}\n", flush=True)
    write_files(
        "mxnet",
        options.output,
        lambda path: write_csv(samples, path),
        lambda path: write_plot(samples, path),
    )
    met = all_met(requirements(samples, losses))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
