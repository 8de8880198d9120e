"""What benchmarks/network.py can be asked, and what it says about itself."""

from __future__ import annotations

import argparse
import re

from benchmarks.collectives import ranks, sizes
from benchmarks.network_hosts import UNLIMITED
from benchmarks.network_promises import LINKS, MODELS
from benchmarks.processes import positive
from benchmarks.promises import add_options
from benchmarks.training_options import CPU_MODELS

SECTIONS = ["training", "losses", "allreduce"]
FLAT_SECTIONS = ["allreduce", "init"]
SIZES = "4,1K,16K,64K,256K,1M,4M,16M,100M"
FLAT_SIZES = "4,1M"

DESCRIPTION = """\
Compare training with hvd.DistributedOptimizer to DistributedDataParallel (Gloo;
gradient_as_bucket_view, static_graph) and hvd.allreduce_ to torch's Gloo between hosts.

The hosts are network name spaces of this machine, joined by a bridge; tc limits the rate at which
each sends. That needs root and the programs ip and tc. Without them, or with --loopback, hosts are
only names (HOROVOD_HOSTNAME), the link is loopback, and no rate is limited.

Each contender has processes of its own. They take turns, while the others sleep; OMP_NUM_THREADS
is 1. A sample is a turn of the slowest rank, a ratio is taken of turns of the same round, and its
median is the result, with the half of its 95 % interval behind "+-". 2.00x means twice as fast.

With --np it is about many ranks instead: all on one host, over loopback, but with every byte
through Gloo, and how long hvd.init() takes beside init_process_group and a first barrier.
"""
EPILOG = """\
examples:
  python benchmarks/network.py                      2 hosts, 1 rank each, three links; half an hour
  python benchmarks/network.py --links 1gbit --models mlp --sections training --seconds 20
  python benchmarks/network.py --hosts 2 3 --per-host 1 2
  python benchmarks/network.py --links 1gbit --next-forward --bf16
  python benchmarks/network.py --sections allreduce --sizes 4,64K,1M --links unlimited
  python benchmarks/network.py --loopback --per-host 4          without root, on 8 cores or more
  python benchmarks/network.py --np 16 64 128                   many ranks, flat; where cores are
  python benchmarks/network.py --next-forward --bf16 --check    for scripts: status 1 when a
                                                                promise is missed

Close other programs first: numbers of a busy machine mean little.
"""


def link(text: str) -> str:
    if text != UNLIMITED and not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a link: use {UNLIMITED}, or a rate such as 10gbit or 500mbit"
        )
    return text


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=ranks, nargs="+", default=[2], metavar="N", help="numbers of hosts (2)")
    add("--per-host", type=count, nargs="+", default=[1], metavar="N", help="ranks on each (1)")
    add(
        "--links",
        type=link,
        nargs="+",
        metavar="RATE",
        help=f"how fast each host may send ({' '.join(LINKS)})",
    )
    add("--loopback", action="store_true", help="hosts are only names, also where they could be")
    add(
        "--np",
        type=ranks,
        nargs="+",
        metavar="N",
        help="flat instead: so many ranks over Gloo and loopback, and how long they take to start",
    )
    add(
        "--sections",
        nargs="+",
        choices=[*SECTIONS, "init"],
        metavar="SECTION",
        help=f"what to measure ({' '.join(SECTIONS)}; with --np {' '.join(FLAT_SECTIONS)})",
    )
    add(
        "--models",
        nargs="+",
        choices=CPU_MODELS,
        default=MODELS,
        metavar="MODEL",
        help=f"which to train, of {' '.join(CPU_MODELS)} ({' '.join(MODELS)})",
    )
    add("--next-forward", action="store_true", help="also ours with overlap_forward=model")
    add("--bf16", action="store_true", help="also both with gradients in bfloat16 on the wire")
    add(
        "--bind",
        action=argparse.BooleanOptionalAction,
        help="give each rank one core (default: where there are as many cores as ranks)",
    )
    add(
        "--same-heap",
        action="store_true",
        help="let all contenders keep freed memory the way that horovodrun and hvd.init() do",
    )
    add(
        "--sizes",
        type=sizes,
        metavar="LIST",
        help=f"of allreduces, with K and M for KiB and MiB ({SIZES}; with --np {FLAT_SIZES})",
    )
    add(
        "--seconds",
        type=positive,
        default=90.0,
        metavar="S",
        help="most time spent on training a model in one setting (90); less where the ratios are "
        "known to 1.5 %% before",
    )
    add(
        "--call-seconds",
        type=positive,
        default=5.0,
        metavar="S",
        help="the same for each size of an allreduce (5)",
    )
    add(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="S",
        help="give up on one model, or size, after this long (600)",
    )
    add_options(parser, "network")
    options = parser.parse_args(arguments)
    allowed = FLAT_SECTIONS if options.np else SECTIONS
    options.sections = options.sections or allowed
    if wrong := sorted(set(options.sections) - set(allowed)):
        needed = "cannot be had with" if options.np else "needs"
        parser.error(f"--sections {' '.join(wrong)} {needed} --np")
    options.sizes = options.sizes or sizes(FLAT_SIZES if options.np else SIZES)
    options.contenders = ["plain", "ours", "ddp"]
    options.contenders += ["ours_next"] if options.next_forward else []
    options.contenders += ["ours_bf16", "ddp_bf16"] if options.bf16 else []
    return options
