"""``horovodrun``: from the command line to the exit status.

The console script and ``python -m horovod.runner`` call `run_commandline`; ``horovod.run`` calls
`run_job`, which only takes signals over when it runs in the main thread. Everything here is cheap
to import (no framework): workers start within a fraction of a second.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import horovod
from horovod.common.logging import LEVELS, get_logger
from horovod.common.store import MemoryStore
from horovod.common.wire import new_key
from horovod.runner import controllers
from horovod.runner.arguments import parse_args
from horovod.runner.colours import Colour
from horovod.runner.console import Console
from horovod.runner.hosts import Slot, is_local, plan_slots
from horovod.runner.outputs import STREAMS, Outputs
from horovod.runner.report import LaunchError, Outcome, describe_failure, exit_status
from horovod.runner.ssh import Ssh
from horovod.runner.static_job import JobRequest, StaticJob
from horovod.runner.store_endpoints import StoreEndpoints
from horovod.runner.supervise import Supervisor
from horovod.runner.tunables import settings, settings_environment
from horovod.runner.watcher import JobWatcher
from horovod.runner.watching import open_watcher, title_of, watched
from horovod.runner.worker_env import terminal_variables

if TYPE_CHECKING:
    from horovod.runner.upstream_launch import (
        _run,
        _run_elastic,
        check_build,
        is_gloo_used,
        run_controller,
    )

__all__ = [
    "_run",
    "_run_elastic",
    "check_build",
    "find_command",
    "is_gloo_used",
    "make_request",
    "parse_args",
    "run_commandline",
    "run_controller",
    "run_job",
]


def __getattr__(name: str) -> Any:
    """Names of Horovod 0.28.1 (docs/old_names.md), which a launch does not need."""
    if name in __all__:
        from horovod.runner import upstream_launch

        return getattr(upstream_launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run_commandline(argv: Sequence[str] | None = None) -> int:
    """Run ``horovodrun`` with these arguments (the process's own by default)."""
    _open_standard_descriptors()
    options = parse_args(argv)
    console = Console(timestamps=options.prefix_timestamp)
    if options.version:
        return console.answer(horovod.__version__)
    if options.check_build:
        from horovod.runner import check_build as build  # rarely needed, so not at every start

        return console.answer(build.check_build(verbose=options.verbose))
    get_logger().setLevel(LEVELS[settings(options, os.environ).log_level])
    for notice in options.notices:
        console.say(notice, Colour.ATTENTION)
    try:
        if options.scaling is not None:
            from horovod.runner.scaling import run_study

            return run_study(options, {**os.environ, **_terminal(console)}, console)
        controller = controllers.choose(options, os.environ)
        if controller != controllers.GLOO:
            return _run_elsewhere(controller, options, console)
        if options.dry_run:
            from horovod.runner.dry_run import describe_plan

            if options.host_discovery_script:
                raise LaunchError(
                    "--dry-run does not run a discovery script; name hosts with -H", 2
                )
            request = make_request(options, options.command, os.environ)
            return console.answer(describe_plan(request))
        env = {**os.environ, **_terminal(console)}
        outcome = run_job(options, options.command, env=env, console=console)
        if outcome.problem:
            console.say(outcome.problem, Colour.FAILURE)
        console.write_account(outcome.account)
        return exit_status(outcome)
    except LaunchError as error:
        console.say(str(error), Colour.FAILURE)
        return error.status
    except KeyboardInterrupt:  # before the supervisor took the signals over
        return 130


def run_job(
    options: argparse.Namespace,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    store: MemoryStore | None = None,
    console: Console | None = None,
    title: str = "",
) -> Outcome:
    """Run ``command`` as the options say, until the end; the outcome tells what went wrong.

    ``env`` is what the workers' environment is made from (by default this process's own). ``store``
    is what the workers reach as the job's store: put something in before, or look into it after.
    ``title`` is what the job is called on its dashboard, by default after the command.
    `LaunchError` when the job cannot even begin.
    """
    console = console or Console(timestamps=options.prefix_timestamp)
    environ = os.environ if env is None else env
    store = MemoryStore() if store is None else store
    watch = functools.partial(
        open_watcher,
        settings(options, environ),
        environ,
        store,
        title=title or title_of(command),
        say=console.say,
        elastic=options.elastic,
    )
    if options.elastic:
        from horovod.runner.elastic.job import run_elastic_job

        if any(is_local(host.name) for host in options.hosts):
            find_command(command[0], environ.get("PATH"))
        with watch() as watcher:
            return run_elastic_job(options, command, environ, store, console, watcher)
    request = make_request(options, command, environ)
    if any(is_local(name) for name in request.hosts):
        find_command(command[0], request.env.get("PATH"))
    with watch() as watcher:
        request = replace(request, env=watched(request.env, watcher))
        return _run_request(options, request, store, console, watcher)


def _run_request(
    options: argparse.Namespace,
    request: JobRequest,
    store: MemoryStore,
    console: Console,
    watcher: JobWatcher,
) -> Outcome:
    with ExitStack() as stack:
        copies = _open_copies(options.output_filename, request.slots, stack)
        outputs = Outputs(console, options.output_ranks, options.attach, watcher)
        if options.attach is not None:
            console.without_bars()
        for slot in request.slots:
            outputs.open(slot.rank, slot.rank, copies.get(slot.rank, {}))
        place = StoreEndpoints(new_key(), store)
        stack.callback(place.close)
        supervisor = Supervisor(console, outputs, pass_interrupts_on=True)
        stack.callback(supervisor.close)
        if options.verbose:
            console.say(f"running {list(request.command)!r} as {len(request.slots)} processes")
            for slot in request.slots:
                console.say(f"rank {slot.rank}: {slot.hostname}, local rank {slot.local_rank}")
        outcome = StaticJob(request, place, supervisor, watcher=watcher).run()
    first = outcome.first_failure
    if first is None:
        outcome.account = describe_failure(outcome, [])
    else:
        log = copies[first.rank]["stderr"].name if copies else None
        tail = outputs.tail(first.rank)
        outcome.account = describe_failure(outcome, tail, log)
        outcome.account += _other_python(request.command[0], request.env.get("PATH"), tail)
    watcher.ended(outcome)
    return outcome


def make_request(
    options: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]
) -> JobRequest:
    """What the options ask for; `LaunchError` where the hosts have too few slots."""
    try:
        slots = plan_slots(options.hosts, options.num_proc)
    except ValueError as error:
        raise LaunchError(str(error), status=2) from None
    timeout = settings(options, env).start_timeout
    return JobRequest(
        command=command,
        slots=slots,
        env={**env, **settings_environment(options, env)},
        cwd=os.getcwd(),
        ssh=Ssh(options.ssh_port, options.ssh_identity_file, timeout),
        nics=options.network_interfaces or (),
        start_timeout=timeout,
        cpu_bind=options.cpu_bind,
        verbose=options.verbose,
        attach=options.attach,
    )


def find_command(command: str, path: str | None = None) -> str:
    """The executable that ``command`` names here, as a shell would find it."""
    found = shutil.which(command, path=path)
    if found:
        return found
    if not os.path.exists(command):
        raise LaunchError(f"command not found: {command!r}", status=127)
    if os.path.isdir(command):
        raise LaunchError(f"{command!r} is a directory, not a command", status=126)
    hint = f"python {command}" if command.endswith(".py") else f"./{command.removeprefix('./')}"
    if os.access(command, os.X_OK):
        raise LaunchError(
            f"command not found: {command!r} is here but not on PATH; did you mean {hint!r}?",
            status=127,
        )
    why = f"did you mean {hint!r}?" if command.endswith(".py") else "is the execute bit missing?"
    raise LaunchError(f"{command!r} is not executable; {why}", status=126)


def _run_elsewhere(controller: str, options: argparse.Namespace, console: Console) -> int:
    """Let mpirun or jsrun start the processes; does not return unless this is a dry run."""
    request = make_request(options, options.command, os.environ)
    plan = controllers.plan(controller, options, request, dry=options.dry_run)
    if settings(options, os.environ).dashboard is not None:
        program = os.path.basename(plan.command[0])
        console.say(f"no dashboard: {program} takes horovodrun's place; --gloo keeps it")
    if options.dry_run:
        return console.answer(controllers.describe(plan))
    if not (options.use_mpi or options.use_jsrun):
        program = os.path.basename(plan.command[0])
        console.say(f"{program} starts the processes here; --gloo lets horovodrun do it itself")
    if options.verbose:
        console.say(f"running {plan.command!r}")
    controllers.replace_us(plan)


def _open_standard_descriptors() -> None:
    """A shell may have closed some (``>&-``): other files must not get their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _other_python(command: str, path: str | None, tail: Sequence[str]) -> str:
    """A hint where a module is missing in a Python that is not the one of this program."""
    found = shutil.which(command, path=path)
    if "python" not in os.path.basename(command) or found is None:
        return ""
    if not any(line.startswith(("ModuleNotFoundError", "ImportError")) for line in tail):
        return ""
    if os.path.abspath(found) == os.path.abspath(sys.executable):
        return ""
    if os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable):
        return ""
    return (
        f"Note that {command!r} is {found}, while horovodrun belongs to {sys.executable}: activate "
        f"the environment that you installed Horovod into, or name its python.\n\n"
    )


def _open_copies(
    directory: str | None, slots: Sequence[Slot], stack: ExitStack
) -> dict[int, dict[str, BinaryIO]]:
    """DIR/rank.<n>/stdout and stderr for every rank, numbers padded to the same width."""
    copies: dict[int, dict[str, BinaryIO]] = {}
    if directory is None:
        return copies
    width = len(str(len(slots) - 1))
    try:
        for slot in slots:
            folder = os.path.join(directory, f"rank.{slot.rank:0{width}d}")
            os.makedirs(folder, exist_ok=True)
            for stream in STREAMS:
                file = open(os.path.join(folder, stream), "wb", buffering=0)  # noqa: SIM115
                copies.setdefault(slot.rank, {})[stream] = stack.enter_context(file)
    except OSError as error:
        raise LaunchError(
            f"argument --output-filename: cannot write {error.filename!r}: {error.strerror}",
            status=2,
        ) from None
    return copies


def _terminal(console: Console) -> dict[str, str]:
    return terminal_variables(console.width, os.environ) if console.is_terminal else {}


if __name__ == "__main__":
    sys.exit(run_commandline())
