#!/usr/bin/env python
"""How far training scales: a cost model from constants measured here, checked against real runs.

Run by people. This process starts the ranks (`benchmarks.scaling_rank`), feeds what they measured
to the model (`benchmarks.scaling_costs`, `benchmarks.scaling_steps`) and reports; see --help.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks import scaling_measure  # noqa: E402
from benchmarks.collectives import ranks, sizes  # noqa: E402
from benchmarks.processes import Progress, positive  # noqa: E402
from benchmarks.promises import warn_if_busy, write_files  # noqa: E402
from benchmarks.scaling_costs import Layout, Link, Machine  # noqa: E402
from benchmarks.scaling_report import (  # noqa: E402
    Results,
    allreduce_check,
    checks_table,
    constants_table,
    efficiencies,
    efficiency_table,
    limits,
    limits_table,
    plans_table,
    training_check,
    write_csv,
    write_plot,
)
from benchmarks.scaling_steps import MIB, NETWORKS  # noqa: E402

MODELS = ["mlp", "transformer"]
TRAINED = [Layout(2, 1), Layout(2, 2)]  # flat, and hierarchical, with the fewest ranks
LATENCY_US = 20.0
GBIT = [25.0, 100.0]

DESCRIPTION = """\
Predict how training scales to many hosts, and say how far the prediction can be trusted.

The model knows what a message costs (latency, and CPU on both sides), what a byte costs (on the
wire, CPU to send, receive, add, copy, and through shared memory), and what Python costs for each
collective. This program measures all of that on this machine in a few seconds: raw TCP over
loopback, numpy, and hvd.allreduce through shared memory. From the algorithms of the network
transport follows how many messages and bytes each rank sends, and so the time of an allreduce and
of a training step:

  flat          all ranks reduce each bucket of gradients over the network, beside backward
  hierarchical  shared memory inside each host, the network between hosts
  next-forward  the same, and what backward did not hide goes on beside the next forward

Then it runs real jobs on this machine and prints the error of its predictions for them. With more
ranks than cores no prediction is below all the ranks' CPU work, shared out among the cores.
"""
EPILOG = """\
examples:
  python benchmarks/scaling_model.py                       about two minutes on two cores
  python benchmarks/scaling_model.py --np 2 4 8 16 32 64   where there are more cores
  python benchmarks/scaling_model.py --only-model          the tables alone, in seconds
  python benchmarks/scaling_model.py --gbit 1 10 --latency-us 50 --per-host 4
  python benchmarks/scaling_model.py --only-model --machine constants.json
                         constants from elsewhere; --keep-machine constants.json writes them

How to read it: "error" is predicted / measured - 1, so -50 % means that the real run took twice as
long as the model says it should. Where that is so with an idle machine, look for the reason in our
code: the model only has the costs that the algorithms cannot do without.

What it assumes about the cluster: its hosts have CPUs like this one and at least a core for each
rank; no two links disturb each other; gradients are in host memory; all ranks are equally fast.
The images per second of one GPU are assumptions as well, printed above the table.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cores = len(os.sched_getaffinity(0))
    few = [size for size in (2, 4, 8, 16, 32, 64) if size <= 4 * cores]
    parser.add_argument(
        "--np",
        type=ranks,
        nargs="+",
        default=few,
        metavar="N",
        help=f"numbers of ranks that are measured ({' '.join(map(str, few))}: up to four a core)",
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=sizes("4,64K,1M,16M"),
        metavar="LIST",
        help="bytes of the allreduces that are measured, with K and M (4,64K,1M,16M)",
    )
    parser.add_argument(
        "--models",
        nargs="*",
        choices=MODELS,
        default=MODELS,
        metavar="MODEL",
        help=f"what is trained to check the model, or nothing ({' '.join(MODELS)})",
    )
    parser.add_argument(
        "--gbit",
        type=positive_number,
        nargs="+",
        default=GBIT,
        metavar="G",
        help="speed of each host's link, Gbit/s (25 100; the published study had 25)",
    )
    parser.add_argument(
        "--latency-us",
        type=positive_number,
        default=LATENCY_US,
        metavar="US",
        help="one way between two hosts, microseconds (20)",
    )
    parser.add_argument(
        "--hosts", type=int, default=128, metavar="N", help="of the largest job (128)"
    )
    parser.add_argument(
        "--per-host", type=int, default=8, metavar="N", help="ranks on each host (8)"
    )
    parser.add_argument(
        "--bucket-mib",
        type=positive_number,
        default=8.0,
        metavar="M",
        help="gradients that are reduced together, MiB (8)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=1.0,
        metavar="S",
        help="time for each measured allreduce; a training run gets three times that (1)",
    )
    parser.add_argument(
        "--only-model", action="store_true", help="measure constants, but run no jobs"
    )
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="take the constants from here (JSON)"
    )
    parser.add_argument(
        "--keep-machine", type=Path, metavar="FILE", help="write the constants there (JSON)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        metavar="DIR",
        help="where scaling.csv and scaling.png go (benchmarks/results)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=300.0,
        metavar="S",
        help="give up on one job after this long (300)",
    )
    options = parser.parse_args(arguments)
    if options.hosts < 1 or options.per_host < 1:
        parser.error("--hosts and --per-host: a job has at least one of each")
    return options


def positive_number(text: str) -> float:
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number") from None


def constants(options: argparse.Namespace) -> Machine:
    if options.machine is None:
        found = scaling_measure.machine(options.timeout)
    else:
        found = Machine(**json.loads(options.machine.read_text()))
    if options.keep_machine is not None:
        options.keep_machine.write_text(json.dumps(asdict(found), indent=1) + "\n")
    return found


def run_jobs(options: argparse.Namespace, results: Results, progress: Progress) -> None:
    """Real jobs beside the predictions for them."""
    seconds, timeout = options.seconds, options.timeout
    for size in options.np:
        found = scaling_measure.allreduces(size, options.sizes, seconds, timeout)
        for nbytes, measured in found.items():
            results.checks.append(allreduce_check(size, nbytes, measured, results.machine))
        progress.advance(f"{size} ranks done")
    for model in options.models:
        for layout in TRAINED:
            run = scaling_measure.training(model, layout, 3 * seconds, timeout)
            bucket_bytes = options.bucket_mib * MIB
            results.checks.append(training_check(run, bucket_bytes, results.machine))
            progress.advance(f"training of {model} done")


def growing(hosts: int, per_host: int) -> list[Layout]:
    """Jobs of 1, 2, 4 ... hosts, and of `hosts`."""
    counts = [1]
    while counts[-1] < hosts:
        counts.append(min(2 * counts[-1], hosts))
    return [Layout(count, per_host) for count in counts]


def assumptions() -> str:
    parts = [
        f"{network.title} {network.rate:g} images/s, batch {network.samples}, "
        f"{sum(layer.parameters for layer in network.layers) * 4:.0f} MB"
        for network in NETWORKS.values()
    ]
    return "Assumed of one GPU (Pascal class, fp32): " + ";\n  ".join(parts) + "."


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    jobs = 0 if options.only_model else len(options.np) + len(TRAINED) * len(options.models)
    progress = Progress(jobs + 1)
    progress.show("constants")
    results = Results(constants(options))
    progress.advance("constants done")
    if not options.only_model:
        run_jobs(options, results, progress)
    progress.clear()
    machine, bucket_bytes = results.machine, options.bucket_mib * MIB
    links = [Link.of(gbit, options.latency_us) for gbit in options.gbit]
    layouts = growing(options.hosts, options.per_host)
    results.efficiencies = efficiencies(machine, links, layouts, bucket_bytes)
    results.parts = limits(machine, links[0], layouts[-1], bucket_bytes)

    print(f"\n{constants_table(machine)}\n")
    if results.checks:
        print(f"{checks_table(results.checks)}\n")
        if max(check.ranks for check in results.checks) > machine.cores:
            print(
                f"More ranks than the {machine.cores} cores: that CPU is shared is in the model.\n"
            )
    print(f"{assumptions()}\n")
    for link in links:
        print(f"{efficiency_table(results.efficiencies, link)}\n")
        print(f"{plans_table(link, layouts[-1].hosts)}\n")
    print(f"{limits_table(results.parts, layouts[-1], links[0])}\n")
    write_files(
        "scaling",
        options.output,
        lambda path: write_csv(results, path),
        lambda path: write_plot(results, path),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
