#!/usr/bin/env python
"""How fast training and allreduce are between hosts: ours against DDP and torch's Gloo.

Run by people, and with --check by whoever guards the project's promises. This process makes the
hosts, starts the ranks in them (`benchmarks.training_rank`, `benchmarks.network_rank`), shows
progress and reports; see --help.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.collectives_report import human  # noqa: E402
from benchmarks.network_calls import CallJobs  # noqa: E402
from benchmarks.network_hosts import UNLIMITED, Network, cores, missing, network  # noqa: E402
from benchmarks.network_options import parse  # noqa: E402
from benchmarks.network_promises import LINKS, requirements  # noqa: E402
from benchmarks.network_report import (  # noqa: E402
    Calls,
    Results,
    Setting,
    Starts,
    Training,
    calls_table,
    losses_table,
    starts_table,
    write_csv,
    write_plot,
)
from benchmarks.processes import Progress  # noqa: E402
from benchmarks.promises import all_met, warn_if_busy, write_files  # noqa: E402
from benchmarks.training_jobs import Jobs, heap_variables  # noqa: E402
from benchmarks.training_report import RIVALS, table  # noqa: E402

FLAT = {"HOROVOD_CPU_OPERATIONS": "gloo"}  # although shared memory would do


class Bench:
    """Measures in the settings that the options name."""

    def __init__(self, options: argparse.Namespace, settings: list[Setting]) -> None:
        self.options = options
        self.results = Results()
        # Links make no difference, and sums of more than two depend on the order.
        pairs = (setting for setting in settings if setting.size == 2)
        self.with_losses = next(pairs, None)
        self.progress = Progress(sum(self._parts(setting) for setting in settings))

    def _parts(self, setting: Setting) -> int:
        options = self.options
        parts = {
            "training": len(options.models),
            "losses": 2 * len(options.models) * (setting == self.with_losses),
            "allreduce": len(options.sizes),
            "init": 1,
        }
        return sum(parts[section] for section in options.sections)

    def measure(self, setting: Setting, hosts: Network) -> None:
        hosts.limit(setting.link)
        sections = self.options.sections
        if "training" in sections or ("losses" in sections and setting == self.with_losses):
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
            knobs=self._knobs,
        )
        chosen = options.contenders
        pairs = [("plain", "ours")]
        pairs += [(rival, one) for one, rival in RIVALS.items() if one in chosen]
        run = Training(setting.size, {}, bound=self._bound(setting), setting=setting)
        for model in options.models:
            self.progress.show(f"{setting.title}, {model}")
            if "training" in options.sections:
                run.speed[model] = jobs.speed(model, chosen, pairs)
            if "losses" in options.sections and setting == self.with_losses:
                run.losses[model] = jobs.losses(model)
        self.results.training.append(run)
        self._show(table(run, "cpu") if run.speed else losses_table(run))

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
        return heap_variables(contender, self.options.same_heap)

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
            print(f"{hosts} {'host' if hosts == 1 else 'hosts'}: {made.note}.", flush=True)
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
    promised = list(requirements(results, settings))
    if not promised:
        print("No promise is about these hosts and ranks.")
    met = all_met(promised) and bool(promised)
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
