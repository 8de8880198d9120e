#!/usr/bin/env python
"""How fast training and allreduce are between hosts: ours against DDP and torch's Gloo.

Run by people, and with --check by whoever guards the project's promises. This process makes the
hosts, starts the ranks in them (`benchmarks.training_rank`, `benchmarks.network_rank`), shows
progress and reports; see --help.
"""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.collectives import ranks, sizes  # noqa: E402
from benchmarks.collectives_report import human  # noqa: E402
from benchmarks.network_calls import CallJobs  # noqa: E402
from benchmarks.network_hosts import UNLIMITED, Network, cores, missing, network  # noqa: E402
from benchmarks.network_promises import LINKS, MODELS, requirements  # noqa: E402
from benchmarks.network_report import (  # noqa: E402
    Calls,
    Results,
    Setting,
    Starts,
    Training,
    calls_table,
    starts_table,
    write_csv,
    write_plot,
)
from benchmarks.processes import Progress, positive  # noqa: E402
from benchmarks.promises import add_options, all_met, warn_if_busy, write_files  # noqa: E402
from benchmarks.training import CPU_MODELS  # noqa: E402
from benchmarks.training_jobs import KEPT_HEAP, Jobs  # noqa: E402
from benchmarks.training_report import RIVALS, table  # noqa: E402

SECTIONS = ["training", "losses", "allreduce"]
FLAT_SECTIONS = ["allreduce", "init"]
SIZES = "4,1K,16K,64K,256K,1M,4M,16M,100M"
FLAT_SIZES = "4,1M"
FLAT = {"HOROVOD_CPU_OPERATIONS": "gloo"}  # although shared memory would do

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
  python benchmarks/network.py                        2 hosts, 1 rank each, three links; 40 minutes
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
        help="let all contenders keep freed memory the way that hvd.init() does",
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


class Bench:
    """Measures in the settings that the options name."""

    def __init__(self, options: argparse.Namespace, settings: list[Setting]) -> None:
        self.options = options
        self.results = Results()
        self.with_losses = [s for s in settings if s.link == settings[0].link]  # no link has any
        self.progress = Progress(sum(self._parts(setting) for setting in settings))

    def _parts(self, setting: Setting) -> int:
        options = self.options
        parts = {
            "training": len(options.models),
            "losses": 2 * len(options.models) * (setting in self.with_losses),
            "allreduce": len(options.sizes),
            "init": 1,
        }
        return sum(parts[section] for section in options.sections)

    def measure(self, setting: Setting, hosts: Network) -> None:
        hosts.limit(setting.link)
        sections = self.options.sections
        if "training" in sections or ("losses" in sections and setting in self.with_losses):
            self._training(setting, hosts)
        if "allreduce" in sections:
            self._allreduce(setting, hosts)
        if "init" in sections:
            found = Starts(setting.size, self._call_jobs(setting, hosts).starts())
            self.results.starts.append(found)
            self.progress.advance(f"{setting.title}, init done")

    def _training(self, setting: Setting, hosts: Network) -> None:
        options = self.options
        jobs = Jobs(
            partial(hosts.commands, per_host=setting.per_host),
            {"device": "cpu", "strong": False, "bind": self._bound(setting)},
            options.seconds,
            options.timeout,
            lambda what: self.progress.advance(f"{setting.title}, {what}"),
            self._knobs,
        )
        chosen = options.contenders
        pairs = [("plain", "ours")]
        pairs += [(rival, one) for one, rival in RIVALS.items() if one in chosen]
        run = Training(setting.size, {}, bound=self._bound(setting), setting=setting)
        for model in options.models:
            self.progress.show(f"{setting.title}, {model}")
            if "training" in options.sections:
                run.speed[model] = jobs.speed(model, chosen, pairs)
            if "losses" in options.sections and setting in self.with_losses:
                run.losses[model] = jobs.losses(model)
        self.results.training.append(run)
        if run.speed:
            self._show(table(run, "cpu"))

    def _allreduce(self, setting: Setting, hosts: Network) -> None:
        run = Calls(setting)
        for nbytes, samples in self._call_jobs(setting, hosts).allreduce(self.options.sizes):
            run.samples[nbytes] = samples
            self.progress.advance(f"{setting.title}, allreduce of {human(nbytes)} done")
        self.results.calls.append(run)
        self._show(calls_table(run))

    def _call_jobs(self, setting: Setting, hosts: Network) -> CallJobs:
        return CallJobs(
            partial(hosts.commands, per_host=setting.per_host),
            setting.size,
            self._bound(setting),
            self.options.call_seconds,
            self.options.timeout,
            FLAT if setting.hosts == 1 else {},
        )

    def _knobs(self, contender: str) -> Mapping[str, str]:
        ours = contender.startswith("ours")
        return KEPT_HEAP if self.options.same_heap and not ours else {}

    def _bound(self, setting: Setting) -> bool:
        chosen = self.options.bind
        return bool(setting.size == cores() if chosen is None else chosen)

    def _show(self, text: str) -> None:
        self.progress.clear()
        print(f"\n{text}\n", flush=True)


def settings_of(options: argparse.Namespace, links: list[str]) -> list[Setting]:
    if options.np:
        return [Setting(1, size) for size in options.np]
    places = itertools.product(options.hosts, options.per_host, links)
    return [Setting(hosts, per_host, link) for hosts, per_host, link in places]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    asked = "--np was given" if options.np else "--loopback was given"
    without = asked if options.np or options.loopback else missing()
    links = options.links or LINKS
    if without is not None and links != [UNLIMITED]:
        if not options.np:
            print("No link is limited: that needs hosts with networks of their own.")
        links = [UNLIMITED]
    settings = settings_of(options, links)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    bench = Bench(options, settings)
    for hosts, chosen in itertools.groupby(settings, lambda setting: setting.hosts):
        with network(hosts, without) as made:
            print(f"{hosts} {'host' if hosts == 1 else 'hosts'}: {made.note}.")
            for setting in chosen:
                bench.measure(setting, made)
    bench.progress.clear()
    results = bench.results
    if results.starts:
        print(f"{starts_table(results.starts)}\n", flush=True)

    write_files(
        "network",
        options.output,
        lambda path: write_csv(results, path),
        lambda path: write_plot(results, path),
    )
    met = all_met(requirements(results, settings))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
