"""Run the same command at several sizes, and compare them: ``horovodrun --scaling 1,2,4,8``.

`launch` calls `run_study`. Sizes take turns, so that other load on the machine affects all of them
alike. Each run is an ordinary job; its time is that of the whole command. Ranks that train with our
optimizers report their steps to the job's store (HOROVOD_STATS_INTERVAL). `observe.reports.scaling`
makes a table, a file and a chart of the measurements.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from horovod.common.store import MemoryStore, Store
from horovod.observe.dashboard.reports import parse_report
from horovod.observe.dashboard.watching import INTERVAL, title_of
from horovod.observe.reports.amounts import count_of
from horovod.observe.reports.scaling import (
    Report,
    Run,
    draw,
    ranks_of,
    read_published,
    table,
    write_csv,
)
from horovod.runner.jobs import controllers
from horovod.runner.jobs.request import describe_plan, make_request
from horovod.runner.jobs.run_job import find_command, run_job
from horovod.runner.output.console import Colour, Console
from horovod.runner.output.report import Exit, LaunchError, exit_status
from horovod.runner.slots.hosts import is_local

FRACTION = "HOROVOD_SCALING_FRACTION"
"""The share of the whole work for each rank: 1/size in a strong study, otherwise 1.0."""

_SECONDS_BETWEEN_REPORTS = "5.0"  # only the last report counts


@dataclass(frozen=True)
class _Ended:
    """The end of a run that gave no measurement."""

    status: int
    how: str
    interrupted: bool = False


def run_study(options: argparse.Namespace, env: Mapping[str, str], console: Console) -> int:
    """Run the study that the options describe, and return the exit status.

    Args:
        options: The options of horovodrun.
        env: The environment from which that of the workers is made.
        console: Where messages and the table go.

    Raises:
        LaunchError: If the study cannot begin.
    """
    controller = controllers.choose(options, env)
    if options.dry_run:
        return console.answer(_describe(controller, options, env))
    path = options.scaling_published
    try:
        published = read_published(path) if path else None
    except ValueError as error:
        raise LaunchError(f"argument --scaling-published: {error}", 2) from None
    _check_output(options)
    if controller == controllers.GLOO and any(is_local(host.name) for host in options.hosts):
        find_command(options.command[0], env.get("PATH"))
    if len(options.scaling) > 1 and not env.get("OMP_NUM_THREADS"):
        console.say(
            "scaling: a rank has more threads at smaller sizes, where fewer share a machine's "
            "cores; set OMP_NUM_THREADS to give it the same at every size",
            Colour.ATTENTION,
        )
    report = Report(options.strong, published, title=title_of(options.command))
    study = _Study(options, env, console, controller, report)
    try:
        study.run()
    except KeyboardInterrupt:  # between two runs, or while mpirun ran
        study.status = 130
    study.finish()
    return study.status


@dataclass
class _Study:
    """The runs so far, and what went wrong."""

    options: argparse.Namespace
    env: Mapping[str, str]
    console: Console
    controller: str
    report: Report
    status: int = 0
    unwritten: str = ""  # why the CSV file could not be written

    def run(self) -> None:
        """Do all runs; a size that fails is not tried again, and the others go on."""
        options = self.options
        for repeat in range(1, options.repeat + 1):
            for size in options.scaling:
                if size in self.report.failed:
                    continue
                which = f" (run {repeat} of {options.repeat})" if options.repeat > 1 else ""
                self.console.say(f"scaling: {ranks_of(size)}{which}")
                result = self._run_once(size, repeat)
                if isinstance(result, Run):
                    self._take(result)
                    continue
                self.status = self.status or result.status
                if result.interrupted:
                    return
                self.report.failed[size] = result.how
                self.console.say(f"scaling: {ranks_of(size)}: {result.how}", Colour.FAILURE)
                if not self.report.runs:  # a command that cannot work at all
                    return

    def finish(self) -> None:
        """Write the table and the files, and report again what failed."""
        report, console, prefix = self.report, self.console, self.options.scaling_output
        left = [n for n in self.options.scaling if n not in report.failed and n not in report.runs]
        if report.runs:
            console.answer(table(report, self.options.scaling))
            undrawn = draw(report, f"{prefix}.png")
            files = [f"{prefix}.csv"] * (not self.unwritten) + [f"{prefix}.png"] * (not undrawn)
            if files:
                console.say(f"scaling: wrote {' and '.join(files)}")
            for problem in filter(None, (self.unwritten, undrawn)):
                console.say(f"scaling: {problem}", Colour.ATTENTION)
            self.status = self.status or int(bool(self.unwritten))
        for size, how in report.failed.items():
            console.say(f"scaling: {ranks_of(size)} failed: {how}", Colour.FAILURE)
        if left:
            console.say(
                f"scaling: not measured: {', '.join(map(ranks_of, left))}", Colour.ATTENTION
            )

    def _take(self, run: Run) -> None:
        self.report.runs.setdefault(run.ranks, []).append(run)
        steps = f", {run.steps_per_second:.4g} steps/s" if run.steps_per_second else ""
        self.console.say(f"scaling: {ranks_of(run.ranks)}: {run.seconds:.2f} s{steps}")
        # After every run, because a study takes hours and may be interrupted.
        path = f"{self.options.scaling_output}.csv"
        self.unwritten = write_csv(self.report, self.options.scaling, path)

    def _run_once(self, size: int, repeat: int) -> Run | _Ended:
        options = _options_for(self.options, size)
        if options.output_filename:
            folder = f"{size}-ranks" + (f".run-{repeat}" if self.options.repeat > 1 else "")
            options.output_filename = os.path.join(options.output_filename, folder)
        env = _environment(self.env, size, self.options.strong)
        began = time.monotonic()
        if self.controller == controllers.GLOO:
            return self._run_here(options, env, began)
        request = make_request(options, options.command, env)
        code = controllers.run_and_wait(controllers.make_plan(self.controller, options, request))
        seconds = time.monotonic() - began
        ended = Exit(0, 0, code)
        return _Ended(ended.status, ended.describe()) if code else Run(size, seconds)

    def _run_here(
        self, options: argparse.Namespace, env: Mapping[str, str], began: float
    ) -> Run | _Ended:
        store, console = MemoryStore(), self.console
        try:
            outcome = run_job(options, options.command, env=env, store=store, console=console)
        except LaunchError as error:
            return _Ended(error.status, str(error))
        seconds = time.monotonic() - began
        status = exit_status(outcome)
        if not status:
            return Run(options.num_proc, seconds, steps_per_second(store, options.num_proc))
        if outcome.problem:
            console.say(outcome.problem, Colour.FAILURE)
        console.write_account(outcome.account)
        first, how = outcome.first_failure, outcome.problem or f"exit status {status}"
        if first is not None:
            how = f"rank {first.rank} ended with {first.describe()}"
        return _Ended(status, how, outcome.interrupted is not None or outcome.output_lost)


def steps_per_second(store: Store, size: int) -> float | None:
    """Return how many steps each rank of a job made in a second; None if none has reported.

    It is the median of the ranks' last reports: all ranks step together.
    """
    found = [rate for rank in range(size) if (rate := _rate(store.try_get(f"stats/0/{rank}")))]
    return statistics.median(found) if found else None


def _rate(content: bytes | None) -> float | None:
    report = parse_report(0, 0, content) if content else None
    if report is None:
        return None
    steps, seconds, rate = map(report.stats.get, ("steps", "step_seconds", "steps_per_second"))
    return steps / seconds if steps and seconds else rate


def _options_for(options: argparse.Namespace, size: int) -> argparse.Namespace:
    """Return the options for the job of one size."""
    job = copy.copy(options)
    job.num_proc, job.scaling = size, None
    return job


def _environment(env: Mapping[str, str], size: int, strong: bool) -> dict[str, str]:
    fraction = repr(1 / size if strong else 1.0)
    return {INTERVAL: _SECONDS_BETWEEN_REPORTS, **env, FRACTION: fraction}


def _check_output(options: argparse.Namespace) -> None:
    """Check the files before the study: nothing known before may fail at its end."""
    prefix, published = options.scaling_output, options.scaling_published
    folder = os.path.dirname(os.path.abspath(prefix))
    if not os.path.isdir(folder):
        raise LaunchError(f"argument --scaling-output: there is no directory {folder!r}", 2)
    for path in (f"{prefix}.csv", f"{prefix}.png"):
        if published and os.path.exists(path) and os.path.samefile(path, published):
            raise LaunchError(
                f"argument --scaling-output: {path!r} is the published run itself; choose another "
                f"prefix",
                2,
            )
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise LaunchError(f"argument --scaling-output: cannot write {path!r}", 2)


def _describe(controller: str, options: argparse.Namespace, env: Mapping[str, str]) -> str:
    lines = []
    for size in options.scaling:
        job = _options_for(options, size)
        request = make_request(job, job.command, _environment(env, size, options.strong))
        if controller == controllers.GLOO:
            plan = describe_plan(request)
        else:
            plan = controllers.describe(controllers.make_plan(controller, job, request, dry=True))
        lines += [f"== {ranks_of(size)}, {count_of(options.repeat, 'time')}\n", plan, ""]
    return "\n".join(lines)
