"""Run ``horovodrun``, from the command line to the exit status.

The console script and ``python -m horovod.runner`` call `run_commandline`. Everything here is cheap
to import (no framework): workers start within a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import horovod
from horovod.common.logging import LEVELS, get_logger
from horovod.runner.jobs import controllers
from horovod.runner.jobs.request import describe_plan, make_request
from horovod.runner.jobs.run_job import run_job
from horovod.runner.options.arguments import parse_args as parse_args  # upstream's name too
from horovod.runner.options.completion import completion_script
from horovod.runner.options.parser import make_parser
from horovod.runner.options.tunables import settings
from horovod.runner.output.console import Colour, Console
from horovod.runner.output.report import LaunchError, exit_status
from horovod.runner.slots.worker_env import terminal_variables

_OLD_NAMES = ("_run", "_run_elastic", "check_build", "is_gloo_used", "run_controller")


def __getattr__(name: str) -> Any:
    """Import names of Horovod 0.28.1 (docs/old_names.md) when a program asks for them."""
    if name in _OLD_NAMES:
        from horovod.runner._upstream import launchers as upstream

        return getattr(upstream, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run_commandline(argv: Sequence[str] | None = None) -> int:
    """Run ``horovodrun``, and return its exit status.

    Args:
        argv: The arguments; by default those of this process.
    """
    _open_standard_descriptors()
    options = parse_args(argv)
    console = Console(timestamps=options.prefix_timestamp)
    if options.version:
        return console.answer(horovod.__version__)
    if options.check_build:
        from horovod.runner import check_build as build  # rarely needed, so not at every start

        return console.answer(build.check_build(verbose=options.verbose))
    if options.plan:
        from horovod.runner.plan import describe, planned_job

        return console.answer(describe(planned_job(options)))
    if options.completion:
        return console.answer(completion_script(make_parser(), options.completion))
    if options.join is not None:
        from horovod.runner.jobs.join import run_join

        try:
            return run_join(options, os.environ, console)
        except LaunchError as error:
            console.say(str(error), Colour.FAILURE)
            return error.status
    get_logger().setLevel(LEVELS[settings(options, os.environ).log_level])
    if options.allocation is not None:
        size = None if options.elastic or options.check else options.num_proc
        for sentence in options.allocation.describe(size):
            console.say(sentence)
    for notice in options.notices:
        console.say(notice, Colour.ATTENTION)
    env = dict(os.environ)
    if console.is_terminal:
        env |= terminal_variables(console.width, os.environ)
    try:
        if options.check:
            from horovod.runner.jobs.host_check import check_hosts

            report, status = check_hosts(options, os.environ, console)
            return console.answer(report) or status
        if options.scaling is not None:
            from horovod.runner.scaling import run_study

            return run_study(options, env, console)
        controller = controllers.choose(options, os.environ)
        if controller != controllers.GLOO:
            return _run_elsewhere(controller, options, console)
        if options.dry_run:
            if options.host_discovery_script:
                raise LaunchError(
                    "--dry-run does not run a discovery script; name hosts with -H", 2
                )
            request = make_request(options, options.command, os.environ)
            return console.answer(describe_plan(request, options.allocation))
        outcome = run_job(options, options.command, env=env, console=console)
        if outcome.problem:
            console.say(outcome.problem, Colour.FAILURE)
        console.write_account(outcome.account)
        return exit_status(outcome)
    except LaunchError as error:
        console.say(str(error), Colour.FAILURE)
        return error.status
    except KeyboardInterrupt:  # before the supervisor handled signals
        return 130


def _run_elsewhere(controller: str, options: argparse.Namespace, console: Console) -> int:
    """Let mpirun or jsrun start the processes; does not return unless this is a dry run."""
    request = make_request(options, options.command, os.environ)
    plan = controllers.make_plan(controller, options, request, dry=options.dry_run)
    program = os.path.basename(plan.command[0])
    wanted = ["dashboard"] * (settings(options, os.environ).dashboard is not None)
    wanted += ["progress"] * options.progress
    if wanted:
        lost = " and no ".join(wanted)
        console.say(f"no {lost}: {program} takes horovodrun's place; --gloo keeps it")
    if options.dry_run:
        return console.answer(controllers.describe(plan))
    if not (options.use_mpi or options.use_jsrun):
        console.say(f"{program} starts the processes here; --gloo lets horovodrun do it itself")
    if options.verbose:
        console.say(f"running {plan.command!r}")
    controllers.replace_process(plan)


def _open_standard_descriptors() -> None:
    """Open descriptors 0 to 2 that a shell has closed (``>&-``): no other file may get them."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


if __name__ == "__main__":
    sys.exit(run_commandline())
