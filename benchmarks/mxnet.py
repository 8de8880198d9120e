#!/usr/bin/env python
"""How fast an MXNet step is with Horovod, against MXNet's ``dist_sync`` and without communication.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks/mxnet_rank.py`), tells them whose turn it is, and reports; see --help.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Measure this checkout, whatever else is installed; and not this folder, whose mxnet.py (we) would
# be taken for MXNet.
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

from benchmarks import framework_steps  # noqa: E402
from benchmarks.processes import (  # noqa: E402
    Commands,
    Progress,
    environment,
    free_port,
    limit,
    positive,
    processes,
    torchrun_environments,
)
from benchmarks.promises import add_options, all_met, warn_if_busy, write_files  # noqa: E402

RANKS = 2
CONTENDERS = {
    "ours": "horovod.mxnet",
    "dist_sync": "MXNet's kvstore dist_sync, one server",
    "plain": "no communication",
}
PAIRS = [("dist_sync", "ours"), ("plain", "ours")]
WANTED = 1.0  # times as fast as dist_sync
TITLES = {"mlp": "MLP, 1.9 M parameters"}

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


@contextmanager
def started(contender: str, folder: Path, steps: int) -> Iterator[Commands]:
    """The commands of a contender's ranks; with them, for as long, what serves them."""
    if contender == "dist_sync":
        servers, workers = parameter_server(steps)
        with processes(servers, [folder / "scheduler", folder / "server"], stdout=2):
            yield workers
        return
    yield [
        (command(contender, rank, steps), environ)
        for rank, environ in enumerate(torchrun_environments(RANKS))
    ]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    progress = Progress(1)
    progress.show("starting, and taking turns")
    with limit(options.timeout):
        samples, losses = framework_steps.measure(
            list(CONTENDERS),
            lambda name, folder: started(name, folder, options.steps),
            PAIRS,
            options.seconds,
        )
    progress.clear()
    title = f"{TITLES['mlp']}, {RANKS} ranks"
    print(f"\n{framework_steps.table(title, CONTENDERS, samples)}\n", flush=True)
    write_files(
        "mxnet",
        options.output,
        lambda path: framework_steps.write_csv({"mlp": samples}, path),
        lambda path: framework_steps.write_plot({"mlp": samples}, TITLES, path),
    )
    found = framework_steps.requirements(
        "faster than dist_sync", "dist_sync", WANTED, samples, losses
    )
    return 1 if options.check and not all_met(found) else 0


if __name__ == "__main__":
    sys.exit(main())
