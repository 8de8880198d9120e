"""The parser with all options of ``horovodrun``, in the order in which people read them.

`arguments` parses with it, and docs/site/option_tables.py makes the documentation from it. Options
that set a variable of Horovod's core come from the table in `tunables`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from horovod.runner.options import syntax, values
from horovod.runner.options.completion import SHELLS
from horovod.runner.options.syntax import Deprecated, HelpFormatter, Parser
from horovod.runner.options.tunables import ELASTIC, LIBRARIES, SECTIONS, Tunable, help_text
from horovod.runner.slots.hosts import parse_hosts

DEFAULT_WORKER_FAILURES = 3


def make_parser() -> Parser:
    """Make the parser; ``--help-all`` shows its options in this order."""
    parser = Parser(
        prog="horovodrun",
        usage=syntax.USAGE,
        description=syntax.DESCRIPTION,
        epilog=syntax.EXAMPLES,
        formatter_class=HelpFormatter,
        add_help=False,
    )
    _add_job(_Group(parser.add_argument_group("job")))
    _add_hosts(
        _Group(parser.add_argument_group("hosts (default: the batch job's, else this machine)"))
    )
    _add_output(_Group(parser.add_argument_group("output")))
    _add_scaling(_Group(parser.add_argument_group("scaling study")))
    _add_plan(_Group(parser.add_argument_group("plan for a slow link")))
    _add_launchers(_Group(parser.add_argument_group("launcher")))
    elastic = _Group(parser.add_argument_group(ELASTIC))
    _add_elastic(elastic)
    for title, rows in SECTIONS.items():
        group = elastic if title == ELASTIC else _Group(parser.add_argument_group(title))
        for row in rows:
            _add_tunable(group, row)
        if title == LIBRARIES:
            _add_mpi(group)
    _add_information(_Group(parser.add_argument_group("information")))
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


class _Group:
    """A group of options, which are added as the help shows them: spellings, and the metavar."""

    def __init__(self, container: argparse._ActionsContainer) -> None:
        self.container = container

    def value(self, option: str, read: Callable[[str], object], help: str, **more: Any) -> None:
        """Add an option with a value for each metavar."""
        words = option.split()
        flags = [word.rstrip(",") for word in words if word.startswith("-")]
        metavars = tuple(words[len(flags) :])
        if len(metavars) > 1:
            more["nargs"] = len(metavars)
        metavar = metavars if len(metavars) > 1 else metavars[0]
        self.container.add_argument(*flags, type=read, metavar=metavar, help=help, **more)

    def switch(self, option: str, help: str, **more: Any) -> None:
        """Add an option without a value."""
        self.container.add_argument(*option.split(", "), action="store_true", help=help, **more)


def _add_job(group: _Group) -> None:
    group.value(
        "-np, --num-proc N",
        values.whole_number(1),
        "Number of processes; for an elastic job, those needed before it starts. Required, "
        "except with --min-np, and in an allocation (Slurm, PBS, SGE, LSF, a Kubernetes MPI job), "
        "where it is all slots of that.",
    )
    group.value(
        "--config-file FILE",
        values.text,
        "YAML file that sets options of the sections from tuning to logging (default: none).",
    )
    group.switch(
        "--dry-run", "Show hosts, ranks, addresses, environment and commands, and start nothing."
    )


def _add_hosts(group: _Group) -> None:
    source = _Group(group.container.add_mutually_exclusive_group())
    source.value(
        "-H, --hosts HOST[:SLOTS],...",
        parse_hosts,
        "Where to run, and at most how many processes there: node1:4,node2:4, node[01-16]:4, "
        "[fe80::2]:4. Hosts without SLOTS share what is left. Filled in this order.",
    )
    source.value(
        "-hostfile, --hostfile FILE",
        values.text,
        "The same in a file: a line is HOST slots=N or HOST:N, # begins a comment.",
    )
    source.value(
        "--host-discovery-script COMMAND",
        values.command_line,
        "Program or command line that prints the hosts available now, HOST or HOST:SLOTS on "
        "each line; makes the job elastic.",
    )
    group.value(
        "--network-interfaces NIC,...",
        values.names,
        "Network interfaces to use between hosts, such as eth0,ib0 (default: those that "
        "lead to the other hosts).",
        action="extend",
    )
    group.value(
        "--network-interface NIC",
        values.names,
        "One of them; may be repeated.",
        dest="network_interfaces",
        action="extend",
    )
    group.value(
        "-p, --ssh-port PORT",
        values.whole_number(1, 65535),
        "Port of the other hosts' ssh server (default: what the ssh configuration says).",
    )
    group.value(
        "-i, --ssh-identity-file FILE",
        values.readable_file,
        "Private key for ssh (default: what the ssh configuration says).",
    )
    group.value(
        "--start-command COMMAND",
        values.start_command,
        "Run this in place of ssh to start a program on a host: 'kubectl exec -i {host} --', "
        "'oc rsh -T {host}'. {host} stands for its name; the program and its arguments follow. It "
        "must pass stdin on (default: srun inside a Slurm job, elsewhere ssh).",
    )
    group.value(
        "--listen [ADDRESS:]PORT",
        values.endpoint,
        "Start nothing on other hosts, but wait here until horovodrun --join has run on them: "
        "on those of -H, or, where it names no others, until there are -np slots (default: none).",
    )
    group.value(
        "--join HOST:PORT",
        values.endpoint,
        "Be a host of the job that waits there, instead of running COMMAND. -H NAME:SLOTS "
        "says what this machine is called, and how many processes it takes (default: its name, "
        "and 1).",
    )
    group.value(
        "--secret-file FILE",
        values.text,
        "The secret that proves a host which joins; --listen makes the file if there is none "
        "(default: _HOROVOD_SECRET_KEY).",
    )
    group.switch(
        "--disable-cache", "Accepted for compatibility: no result of a check is kept between jobs."
    )


def _add_output(group: _Group) -> None:
    group.value(
        "--output-filename DIR",
        values.text,
        "Also write each rank's output, as it is, to DIR/rank.<n>/stdout and stderr.",
    )
    group.value(
        "--output-ranks RANKS",
        values.ranks,
        "Show only the output of these ranks, such as 0,2-3; files get that of all (default: all).",
    )
    group.value(
        "--attach RANK",
        values.rank,
        "Give this rank the launcher's stdin, and show its output as it is: for breakpoint() "
        "and input().",
    )
    group.switch(
        "--progress",
        "Show on the last line of the terminal the step that the job is in, steps per second, "
        "and which rank is slow and why; where there is no terminal, every 30 seconds.",
    )
    group.switch(
        "-prefix-timestamp, --prefix-output-with-timestamp",
        "Put the time before the [rank]<stream>: of each line.",
        dest="prefix_timestamp",
    )
    group.container.add_argument(
        "--verbose",
        action="count",
        default=0,
        help="Say what is started, where, with which variables, and how it ended; given twice, "
        "also the commands that reach the hosts, the addresses found, and every event of an "
        "elastic job (default: failures, changes of an elastic job, and who is awaited).",
    )


def _add_scaling(group: _Group) -> None:
    group.value(
        "--scaling N,N,...",
        values.sizes,
        "Run COMMAND with each of these numbers of processes in turn, instead of -np, and "
        "print time, steps per second, speed-up and efficiency. Every rank is to have the same "
        "work at every size (weak scaling), unless --strong is given.",
    )
    group.switch(
        "--strong",
        "The whole work is the same at every size. COMMAND divides it: by the number of "
        "ranks, as DistributedSampler does, or by HOROVOD_SCALING_FRACTION, which is 1/N (without "
        "--strong: 1.0).",
    )
    group.value(
        "--repeat R",
        values.whole_number(1),
        "Run every size R times, in turns, and take medians (default: 1).",
    )
    group.value(
        "--scaling-published FILE",
        values.readable_file,
        "CSV file with the columns ranks and seconds: somebody else's run, or the file of an "
        "earlier study, to show beside this one (default: none).",
    )
    group.value(
        "--scaling-output PREFIX",
        values.text,
        "Write the table to PREFIX.csv and a chart to PREFIX.png (default: scaling). The "
        "chart needs matplotlib: pip install matplotlib.",
    )


def _add_plan(group: _Group) -> None:
    group.switch(
        "--plan",
        "Show how fast training can be over the hosts' link, with gradients averaged in every "
        "step, in fewer bits, or every so many steps, recommend one, and exit. Needs the three "
        "options below, and -np or -H, such as: --plan -np 8 --model-size 124M --step-time 0.3 "
        "--link 1Gbit/20ms.",
    )
    group.value(
        "--model-size N", values.parameters, "Number of the model's parameters: 350K, 124M or 7B."
    )
    group.value(
        "--step-time SECONDS",
        values.seconds,
        "Time of a training step on one host without communication.",
    )
    group.value(
        "--link RATE/LATENCY",
        values.link,
        "What connects the hosts: 10Gbit, 1Gbit/20ms or 100Mbit/50ms; the latency is one way "
        "(default: 0).",
    )


def _add_launchers(group: _Group) -> None:
    which = _Group(group.container.add_mutually_exclusive_group())
    which.switch(
        "--gloo", "Start the processes directly and through ssh (the default).", dest="use_gloo"
    )
    which.switch("--mpi", "Start them with mpirun instead.", dest="use_mpi")
    which.switch("--jsrun", "Start them with jsrun instead, inside an LSF job.", dest="use_jsrun")
    group.value(
        "--cpu-bind HOW",
        str,
        "Bind each process to its share of the host's cores (core), or to a NUMA node (numa) "
        "(default: none).",
        choices=("none", "core", "numa"),
        default="none",
    )


def _add_elastic(group: _Group) -> None:
    group.value(
        "--min-np, --min-num-proc N",
        values.whole_number(1),
        "Fewest processes with which the job goes on (default: -np).",
        dest="min_num_proc",
    )
    group.value(
        "--max-np, --max-num-proc N",
        values.whole_number(1),
        "Most processes that it uses (default: as many as there are slots).",
        dest="max_num_proc",
    )
    group.value(
        "--slots-per-host N",
        values.whole_number(1),
        "Slots of a host for which none are given (default: each must say).",
    )
    group.value(
        "--reset-limit N",
        values.whole_number(0),
        "Changes of membership after which the job ends; 0 allows none (default: no limit).",
    )
    group.value(
        "--blacklist-cooldown-range MIN MAX",
        values.whole_number(1, 3600),
        "Seconds, 1 to 3600, after which a host that failed may be used again; the wait "
        "grows from MIN to MAX (default: never again).",
    )
    group.value(
        "--max-worker-failures N",
        values.whole_number(1),
        "Failed processes after which a host is not used any more "
        f"(default: {DEFAULT_WORKER_FAILURES}).",
    )
    group.value(
        "--status-file FILE",
        values.new_file,
        "Append what happens (hosts, workers, decisions, failures) to this file, one JSON "
        "object a line (default: none).",
    )


def _add_mpi(group: _Group) -> None:
    group.value(
        "--mpi-args ARGS",
        values.text,
        "More arguments for mpirun, in one piece: --mpi-args='-x NAME'.",
    )
    group.value(
        "--binding-args ARGS",
        values.text,
        "Arguments for mpirun that bind processes to cores, in one piece, instead of the "
        "usual ones: --binding-args='--bind-to core'.",
    )
    group.switch(
        "--tcp", "No InfiniBand: NCCL and Spectrum MPI talk over TCP only.", dest="tcp_flag"
    )


def _add_information(group: _Group) -> None:
    group.container.add_argument(
        "-h",
        "--help",
        action="version",  # it prints a text and ends the program
        version=syntax.SHORT_HELP,
        help="Show the options that most jobs need, with examples, and exit.",
    )
    group.container.add_argument("--help-all", action="help", help="Show all options and exit.")
    group.switch("-v, --version", "Show the version and exit.")
    group.switch(
        "-cb, --check-build",
        "Show which frameworks, clusters, controllers, tensor operations and devices work "
        "here, and exit.",
    )
    group.switch(
        "--check",
        "Check in some seconds whether a job could run on the hosts, and exit: a row for each "
        "with versions, devices, clock, addresses, ports and speed of the network, and a sentence "
        "for whatever is wrong. The exit status is 1 if a job would fail.",
    )
    group.value(
        "--completion SHELL",
        str,
        "Print a script that completes these options in bash, zsh or fish, and exit.",
        choices=SHELLS,
    )


def _add_tunable(group: _Group, row: Tunable) -> None:
    text = help_text(row).replace("%", "%%")
    if not row.opposite:
        group.container.add_argument(row.flag, metavar=row.metavar, type=row.parse, help=text)
        return
    pair = group.container.add_mutually_exclusive_group()
    pair.add_argument(row.flag, action="store_const", const=True, help=text)
    pair.add_argument(
        row.opposite,
        dest=row.dest,
        action="store_const",
        const=False,
        help=argparse.SUPPRESS if row.knob.default is not None else f"The opposite of {row.flag}.",
    )
    for flag, value in row.deprecated:
        instead = row.flag if value else row.opposite
        pair.add_argument(flag, dest=row.dest, const=value, action=Deprecated, instead=instead)
