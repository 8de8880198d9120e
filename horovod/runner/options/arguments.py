"""Read the command line of ``horovodrun``, and check that the options describe a job.

`launch` calls `parse_args`. A mistake ends the program with exit status 2 and a message that says
what to type instead. The result has these attributes. An attribute that is not given is None (a
switch: False), unless stated otherwise:

job       num_proc (int; for a scaling study the largest), command (list), dry_run, config_file
hosts     hosts (list of `Host`; localhost when nothing is given, empty with a discovery script),
          hostfile (path), host_discovery_script (absolute path), network_interfaces (list),
          allocation (`Allocation`: the batch job of the hosts if no option names them, or None)
reaching  ssh_port (int), ssh_identity_file (path), start_command (with {host} in it), listen
          (address, port), secret_file (path), join (address, port): with join only hosts and
          secret_file count, and nothing else is checked
output    output_filename, output_ranks (list of int), attach (rank or None), progress,
          prefix_timestamp, verbose (int: how often)
scaling   scaling (sizes, ascending), strong, repeat (1 by default), scaling_output ("scaling" by
          default), scaling_published (path)
plan      plan, model_size (parameters), step_time (seconds), link (seconds one way, bytes per
          second): with plan only these, num_proc and hosts count, and nothing else is checked
launcher  use_gloo, use_mpi, use_jsrun (at most one is True), mpi_args (text), binding_args (text),
          tcp_flag, cpu_bind ("none", "core" or "numa"; never None)
elastic   elastic (whether this is an elastic job), min_num_proc (num_proc by default in an elastic
          job), max_num_proc, slots_per_host, reset_limit, max_worker_failures (3 by default
          in an elastic job), blacklist_cooldown_range ([lowest, highest], seconds), status_file
about     version, check_build, completion ("bash", "zsh" or "fish"): nothing else is checked when
          one of them is given; check (needs neither num_proc nor command); disable_cache
notices   list of sentences to show before the job starts, about options that have no effect here
others    one for each row of `tunables.TUNABLES`, such as fusion_threshold_mb, start_timeout and
          log_level, from the option or the configuration file. `tunables.settings_environment`
          returns the workers' variables, `tunables.settings` the values that count.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence

from horovod.runner.options.config_file import CONTROLLER, read_config_file
from horovod.runner.options.parser import DEFAULT_WORKER_FAILURES, make_parser
from horovod.runner.options.syntax import fill_in_values
from horovod.runner.options.tunables import (
    TUNABLES,
    chosen_variables,
    ineffective_variables,
    settings,
)
from horovod.runner.slots.allocation import find_allocation
from horovod.runner.slots.hosts import Host, is_local, parse_hostfile, plan_slots

_NEEDS_ELASTIC = (
    "max_num_proc",
    "slots_per_host",
    "elastic_timeout",
    "reset_limit",
    "blacklist_cooldown_range",
    "max_worker_failures",
    "status_file",
)
_NEEDS_MPIRUN = ("mpi_args", "binding_args")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def parse_args(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """Return the options; end the program with status 2 if they do not describe a job.

    Args:
        argv: The arguments; by default those of this process.
        environ: The environment of the launcher.
    """
    try:
        return make_options(sys.argv[1:] if argv is None else argv, environ)
    except ValueError as error:
        make_parser().give_up(str(error))


def make_options(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """Return the options, for a program that starts a job.

    Args:
        argv: The arguments.
        environ: The environment of the launcher.

    Raises:
        ValueError: If they do not describe a job.
    """
    parser = make_parser()
    words = fill_in_values(parser, argv)
    options, unknown = parser.parse_known_args(words, argparse.Namespace(notices=[]))
    if unknown:
        raise ValueError(_unrecognised(parser, unknown[0]))
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.version or options.check_build or options.completion:
        return options
    _check_plan(options)
    if options.plan:
        return options
    if options.join is not None:
        _check_join(options)
        return options
    typed = chosen_variables(options)
    _settle_scaling(parser, options)
    _merge_config_file(options)
    _settle_hosts(options, environ)
    _settle_job(options)
    _check_sizes(options)
    _settle_elastic(options)
    _settle_launcher(options, environ)
    _check_listen(parser, options)
    settings(options, environ)  # raises an error for variables that the workers would refuse
    # Only for options that were typed: a configuration file may well list values that matter
    # only together with others.
    options.notices += ineffective_variables(
        typed, {**environ, **chosen_variables(options)}
    ).values()
    options.notices += _notices(parser, options, environ)
    return options


def as_words(values: Mapping[str, object]) -> list[str]:
    """Return the words of a command line.

    Args:
        values: The value of each option. True stands for a switch that is on, a list for several
            words; None and False leave the option out.
    """
    words: list[str] = []
    for flag, value in values.items():
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")
    return words


def _check_plan(options: argparse.Namespace) -> None:
    """Check that the options of a plan are complete, or that there is none of them."""
    given = {"--model-size": options.model_size, "--step-time": options.step_time}
    for flag, value in {**given, "--link": options.link}.items():
        if value is not None and not options.plan:
            raise ValueError(f"argument {flag}: it belongs to --plan, which is missing")
        if value is None and options.plan:
            raise ValueError(
                f"argument --plan: {flag} is missing; for example: horovodrun --plan -np 8 "
                f"--model-size 124M --step-time 0.3 --link 1Gbit/20ms"
            )
    if options.plan and not options.hosts and not options.num_proc:
        raise ValueError("argument --plan: say how many hosts there are, with -np or -H")


def _check_join(options: argparse.Namespace) -> None:
    """Check the options of a host that joins: the job's own command line says what to run."""
    if options.command:
        raise ValueError(
            f"argument --join: leave out {options.command[0]!r}: the job that is joined says what "
            f"to run"
        )
    if options.hosts is not None and len(options.hosts) != 1:
        raise ValueError("argument --join: -H names this machine alone, such as node1:4")
    if options.join[0] == "0.0.0.0" or options.join[1] == 0:
        raise ValueError("argument --join: say where the job waits, such as node1:29400")


def _check_listen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check the options of a job that waits for hosts: it neither starts nor looks for them."""
    if options.listen is None:
        if options.secret_file is not None:
            options.notices.append("--secret-file has no effect without --listen or --join")
        return
    names = ("host_discovery_script", "start_command", "scaling", "use_mpi", "use_jsrun")
    for flag in _given_flags(parser, options, (*names, "dry_run", "check")):
        raise ValueError(f"argument --listen: not possible with {flag}")
    options.use_gloo = True


def _unrecognised(parser: argparse.ArgumentParser, argument: str) -> str:
    import difflib

    flag = argument.partition("=")[0]
    close = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.75)
    hint = f"did you mean {close[0]}?" if close else "horovodrun --help-all lists all options"
    return f"unrecognized argument {flag!r}; {hint}"


def _merge_config_file(options: argparse.Namespace) -> None:
    """Take values from the configuration file, unless an option sets them."""
    if options.config_file is None:
        return
    try:
        found = read_config_file(options.config_file)
    except ValueError as error:
        raise ValueError(f"argument --config-file: {error}") from None
    controller = found.pop(CONTROLLER, None)
    if controller and not (options.use_gloo or options.use_mpi or options.use_jsrun):
        setattr(options, f"use_{controller}", True)
    for name, value in found.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _settle_hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Set `options.hosts` from a hostfile, a batch system or -H."""
    options.allocation = None
    if options.hostfile is not None:
        options.hosts = _read_hostfile(options.hostfile)
    elif options.host_discovery_script is not None:
        options.hosts = []
    elif options.hosts is None:
        _settle_allocation(options, environ)
    local = [host.name for host in options.hosts if is_local(host.name)]
    if len(local) > 1:
        options.notices.append(
            f"{', '.join(local)} are all this machine: they count as {len(local)} hosts, and share "
            f"its cores"
        )


def _settle_allocation(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Take hosts and the number of processes from a batch system, unless hosts join."""
    if options.listen is not None:
        options.hosts = []
        return
    options.allocation = found = find_allocation(environ)
    options.hosts = list(found.hosts) if found else []
    if found:
        if not options.check:
            found.check_size(options.num_proc)
        options.num_proc = options.num_proc or found.slots


def _read_hostfile(path: str) -> list[Host]:
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:  # editors may write a BOM
            return parse_hostfile(file)
    except OSError as error:
        why = f"cannot read {path!r}: {error.strerror}"
    except ValueError as error:
        why = f"{path}: {error}"
    raise ValueError(f"argument -hostfile/--hostfile: {why}")


def _settle_job(options: argparse.Namespace) -> None:
    if options.num_proc is None:
        options.num_proc = options.min_num_proc
    if options.num_proc is None and options.check:
        options.num_proc = sum(host.slots or 1 for host in options.hosts) or 1
    if options.num_proc is None:
        raise ValueError(
            "say how many processes to run, for example: horovodrun -np 2 python train.py"
        )
    words = [word for word in options.command if not _ASSIGNMENT.match(word)]
    if not (words and words[0]) and not options.check:
        size = f"-np {options.num_proc}"
        if options.scaling is not None:
            size = f"--scaling {','.join(map(str, options.scaling))}"
        raise ValueError(f"say what to run, for example: horovodrun {size} python train.py")
    if options.command and _ASSIGNMENT.match(options.command[0]):  # NAME=VALUE python train.py
        options.command.insert(0, "env")
    if not options.hosts and options.host_discovery_script is None and options.listen is None:
        options.hosts = [Host("localhost", options.num_proc)]
    if options.network_interfaces is not None:
        options.network_interfaces = list(dict.fromkeys(options.network_interfaces))


def _settle_scaling(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check the options of a scaling study, which says itself how many processes there are."""
    if options.scaling is None:
        names = ("repeat", "scaling_output", "scaling_published", "strong")
        for flag in _given_flags(parser, options, names):
            raise ValueError(f"argument {flag}: it is for a study with --scaling, such as 1,2")
        return
    if options.num_proc is not None:
        raise ValueError("argument --scaling: it says how many processes to run; leave out -np")
    elastic = ("host_discovery_script", "min_num_proc", *_NEEDS_ELASTIC)
    for flag in _given_flags(parser, options, elastic):
        raise ValueError(
            f"argument --scaling: not possible in an elastic job, whose size changes; leave out "
            f"{flag}"
        )
    if options.attach is not None:
        raise ValueError("argument --attach: not possible with --scaling, which runs several jobs")
    options.num_proc = options.scaling[-1]
    options.repeat = options.repeat or 1
    options.scaling_output = options.scaling_output or "scaling"


def _check_sizes(options: argparse.Namespace) -> None:
    for size in options.scaling or ():
        try:
            plan_slots(options.hosts, size)
        except ValueError:
            slots = sum(host.slots or 0 for host in options.hosts)
            raise ValueError(
                f"argument --scaling: {size} processes do not fit, the hosts offer {slots} slots; "
                f"leave that size out, or give more slots (-H NAME:SLOTS)"
            ) from None


def _settle_elastic(options: argparse.Namespace) -> None:
    options.elastic = options.min_num_proc is not None or bool(options.host_discovery_script)
    most = options.max_num_proc
    if options.elastic:
        least = options.min_num_proc = options.min_num_proc or options.num_proc
        options.max_worker_failures = options.max_worker_failures or DEFAULT_WORKER_FAILURES
        if most is not None and least > most:
            raise ValueError(f"--min-np {least} is more than --max-np {most}")
        if least > options.num_proc:
            raise ValueError(f"--min-np {least} is more than -np {options.num_proc}")
        if most is not None and options.num_proc > most:
            raise ValueError(f"-np {options.num_proc} is more than --max-np {most}")
    cooldown = options.blacklist_cooldown_range
    if cooldown is not None and cooldown[0] > cooldown[1]:
        raise ValueError(
            f"argument --blacklist-cooldown-range: {cooldown[0]} is more than {cooldown[1]}"
        )
    last = (most or options.num_proc) - 1
    shown = options.output_ranks
    if shown is not None and shown[-1] > last and not (options.elastic and most is None):
        raise ValueError(f"argument --output-ranks: there is no rank {shown[-1]}, {last} is last")
    if options.attach is not None and options.elastic:
        raise ValueError("argument --attach: not possible in an elastic job, whose ranks change")
    if options.attach is not None and options.attach > last:
        raise ValueError(f"argument --attach: there is no rank {options.attach}, {last} is last")


def _settle_launcher(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    if options.use_jsrun and not environ.get("LSB_JOBID"):
        raise ValueError("argument --jsrun: this is no LSF job (LSB_JOBID is not set)")
    if options.elastic and (options.use_mpi or options.use_jsrun):
        flag = "--mpi" if options.use_mpi else "--jsrun"
        options.notices.append(f"{flag} is ignored: the processes of an elastic job come and go")
        options.use_mpi = options.use_jsrun = False


def _notices(
    parser: argparse.ArgumentParser, options: argparse.Namespace, environ: Mapping[str, str]
) -> list[str]:
    """Return sentences about options that have no effect."""
    found = [
        f"{row.flag} has no effect: {row.inert_reason}"
        for row in TUNABLES
        if row.inert_reason and getattr(options, row.dest)
    ]
    if options.disable_cache:
        found.append("--disable-cache has no effect: nothing is kept between jobs")
    if not options.elastic:
        given = _given_flags(parser, options, _NEEDS_ELASTIC)
        found += [f"{flag} has no effect: this job is not elastic" for flag in given]
    if not (options.use_mpi or options.use_jsrun):
        given = _given_flags(parser, options, _NEEDS_MPIRUN)
        found += [f"{flag} has no effect without --mpi or --jsrun" for flag in given]
        if options.mpi_threads_disable and settings(options, environ).cpu_operations != "mpi":
            found.append("--mpi-threads-disable has no effect: MPI carries nothing in this job")
    return found


def _given_flags(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str]
) -> list[str]:
    """Return the options that set these attributes, if they have a value or are on."""
    flags = {action.dest: action.option_strings[0] for action in parser._actions[:-1]}
    given = {name: getattr(options, name) for name in names}
    return [flags[n] for n, value in given.items() if value is not None and value is not False]
