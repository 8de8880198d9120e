#!/usr/bin/env python
"""How fast training is: DistributedOptimizer against DistributedDataParallel and no communication.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks.training_rank`), shows progress and reports; see --help.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.gpus import Gpus, gpus_for  # noqa: E402
from benchmarks.named_hosts import host_counts  # noqa: E402
from benchmarks.parts import Parts  # noqa: E402
from benchmarks.processes import Commands, Progress, torchrun_environments  # noqa: E402
from benchmarks.promises import all_met, warn_if_busy, write_files  # noqa: E402
from benchmarks.training_jobs import COMPARED, Jobs, heap_variables  # noqa: E402
from benchmarks.training_options import models_of, parse  # noqa: E402
from benchmarks.training_promises import requirements  # noqa: E402
from benchmarks.training_report import (  # noqa: E402
    LABELS,
    RIVALS,
    Results,
    Run,
    summary,
    table,
    write_csv,
    write_plot,
)
from benchmarks.turns import Samples  # noqa: E402

MEMORY_RUNS = 3  # how full the heap becomes differs between runs


def duels(contenders: Sequence[str]) -> list[tuple[str, str]]:
    """(over, under) of the contenders whose ratios we want to know."""
    wanted = [("plain", "ours"), *((theirs, ours) for ours, theirs in RIVALS.items())]
    return [pair for pair in wanted if set(pair) <= set(contenders)]


def jobs(
    size: int,
    options: argparse.Namespace,
    progress: Progress,
    hosts: int = 1,
    gpus: Gpus | None = None,
) -> Jobs:
    """What starts jobs of `size` ranks as the options say, on hosts that are only names."""
    devices = gpus or Gpus()

    def place(program: list[str], more: Mapping[str, str]) -> Commands:
        environments = torchrun_environments(size, size // hosts)
        return [
            (program, {**environ, **devices.variables(rank, size), **more})
            for rank, environ in enumerate(environments)
        ]

    def knobs(contender: str) -> dict[str, str]:
        chosen = {"HOROVOD_ELASTIC": "1"} if options.force_reduction else {}
        if options.autotune:
            chosen["HOROVOD_AUTOTUNE"] = "1"
        return chosen | heap_variables(contender, options.same_heap)

    # With overlap_forward the first steps show how fast the network is, which needs quiet.
    tunes_itself = options.autotune or "ours_next" in options.contenders
    named = ("device", "strong", "bind", "batch", "turn")
    return Jobs(
        place,
        {name: getattr(options, name) for name in named},
        options.seconds,
        options.timeout,
        lambda what: progress.advance(f"{size} ranks, {what}"),
        knobs=knobs,
        precise=options.percent / 100,
        is_simultaneous=options.device == "cuda" and not tunes_itself,
    )


class Bench:
    """Measures run by run, and shows what it knows as soon as it knows it."""

    def __init__(self, options: argparse.Namespace, gpus: Gpus) -> None:
        self.results = Results()
        self.parts = Parts(options.timeout, options.limit)
        self._options = options
        self._gpus = gpus
        self._pairs = duels(options.contenders)
        self._on_cpu = options.device == "cpu"
        self._progress = Progress(sum(map(self._steps, options.np)))

    def _steps(self, size: int) -> int:
        """Parts of the runs with that many ranks."""
        models, runs = len(models_of(self._options, size)), len(host_counts(self._options, size))
        memory = MEMORY_RUNS * len(self._options.contenders) * self._on_cpu
        losses = len(COMPARED) * self._compares_losses(size)
        further = 0 if self._options.only_speed or size == 1 else memory + losses
        return models * (runs + further)

    def _compares_losses(self, size: int) -> bool:
        """NCCL adds up more than two in an order that may differ from ours; on CPUs it is known."""
        return size == 2 or (self._on_cpu and size > 1)

    def measure(self, size: int, hosts: int, with_more: bool) -> None:
        """All models in one setting; `with_more` than their speed."""
        options = self._options
        run = Run(size, {}, bound=options.bind, hosts=hosts, gpu=self._gpus.name)
        self._progress.show(run.title)
        try:
            for model in models_of(options, size):
                self._speed(run, model)
            if with_more:
                for model in models_of(options, size):
                    self._losses_and_memory(run, model)
        finally:  # also when we are told to end
            self._progress.clear()
            if run.speed:
                self.results.runs.append(run)
                print(f"\n{table(run, options.device)}\n", flush=True)

    def _speed(self, run: Run, model: str) -> None:
        with_memory = not (self._on_cpu or self._options.only_speed)

        def measure(seconds: float) -> tuple[Samples, dict[str, float]]:
            bench = self._jobs(run, seconds)
            if with_memory:
                return bench.speed_and_memory(model, self._options.contenders, self._pairs)
            return bench.speed(model, self._options.contenders, self._pairs), {}

        found = self.parts.attempt(f"{run.title}, speed of {model}", measure)
        if found is None:
            return
        run.speed[model], peaks = found
        lost = [one for one in self._options.contenders if one not in run.speed[model]]
        self.parts.missing += [f"{run.title}, speed of {model}, {LABELS[one]}" for one in lost]
        if peaks:
            run.memory[model] = peaks
        self._progress.clear()
        print(summary(run, model), flush=True)

    def _losses_and_memory(self, run: Run, model: str) -> None:
        if self._compares_losses(run.size):
            losses = self.parts.attempt(
                f"{run.title}, losses of {model}",
                lambda seconds: self._jobs(run, seconds).losses(model),
            )
            run.losses.update({model: losses} if losses is not None else {})
        if self._on_cpu:
            peaks = self.parts.attempt(
                f"{run.title}, memory of {model}",
                lambda seconds: self._host_peaks(self._jobs(run, seconds), model),
            )
            run.memory.update({model: peaks} if peaks is not None else {})

    def _host_peaks(self, bench: Jobs, model: str) -> dict[str, float]:
        """Mebibytes of a process of each contender, at its highest."""
        return {
            one: median(
                peak for _ in range(MEMORY_RUNS) for peak in bench.found("memory", model, one)
            )
            for one in self._options.contenders
        }

    def _jobs(self, run: Run, seconds: float) -> Jobs:
        """What starts this run's jobs, of which each may take so long."""
        made = jobs(run.size, self._options, self._progress, run.hosts, self._gpus)
        return replace(made, timeout=seconds)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    with gpus_for(options.device, max(options.np), not options.no_mps) as gpus:
        bench = Bench(options, gpus)
        for size in options.np:
            for number, hosts in enumerate(host_counts(options, size)):
                # Losses and memory are the same on whichever hosts.
                more = number == 0 and size > 1 and not options.only_speed
                bench.measure(size, hosts, more)

    results = bench.results
    if results.runs:
        write_files(
            "training",
            options.output,
            lambda path: write_csv(results, path),
            lambda path: write_plot(results, path),
        )
    met = all_met(requirements(results, options.device))
    bench.parts.explain()
    return 1 if bench.parts.missing or (options.check and not met) else 0


if __name__ == "__main__":
    sys.exit(main())
