"""The parser with all options of ``horovodrun``, in the order in which people read them.

`arguments` parses with it, and `options.page` makes the documentation from it. Options that set a
variable of Horovod's core come from the table in `tunables`.
"""

from __future__ import annotations

import argparse

from horovod.runner.options import syntax, values
from horovod.runner.options.completion import SHELLS
from horovod.runner.options.plan import add_plan
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
    _add_job(parser.add_argument_group("job"))
    _add_hosts(parser.add_argument_group("hosts (default: the batch job's, else this machine)"))
    _add_output(parser.add_argument_group("output"))
    _add_scaling(parser.add_argument_group("scaling study"))
    add_plan(parser.add_argument_group("plan for a slow link"))
    _add_launchers(parser.add_argument_group("launcher"))
    elastic = parser.add_argument_group(ELASTIC)
    _add_elastic(elastic)
    for title, rows in SECTIONS.items():
        group = elastic if title == ELASTIC else parser.add_argument_group(title)
        for row in rows:
            _add_tunable(group, row)
        if title == LIBRARIES:
            _add_mpi(group)
    _add_information(parser.add_argument_group("information"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-np",
        "--num-proc",
        type=values.whole_number(1),
        metavar="N",
        help="Number of processes; for an elastic job, those needed before it starts. Required, "
        "except with --min-np, and in an allocation (Slurm, PBS, SGE, LSF, a Kubernetes MPI job), "
        "where it is all slots of that.",
    )
    group.add_argument(
        "--config-file",
        type=values.text,
        metavar="FILE",
        help="YAML file that sets options of the sections from tuning to logging (default: none).",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Show hosts, ranks, addresses, environment and commands, and start nothing.",
    )


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "-H",
        "--hosts",
        type=parse_hosts,
        metavar="HOST[:SLOTS],...",
        help="Where to run, and at most how many processes there: node1:4,node2:4, node[01-16]:4, "
        "[fe80::2]:4. Hosts without SLOTS share what is left. Filled in this order.",
    )
    source.add_argument(
        "-hostfile",
        "--hostfile",
        type=values.text,
        metavar="FILE",
        help="The same in a file: a line is HOST slots=N or HOST:N, # begins a comment.",
    )
    source.add_argument(
        "--host-discovery-script",
        type=values.command_line,
        metavar="COMMAND",
        help="Program or command line that prints the hosts available now, HOST or HOST:SLOTS on "
        "each line; makes the job elastic.",
    )
    group.add_argument(
        "--network-interfaces",
        type=values.names,
        action="extend",
        metavar="NIC,...",
        help="Network interfaces to use between hosts, such as eth0,ib0 (default: those that "
        "lead to the other hosts).",
    )
    group.add_argument(
        "--network-interface",
        dest="network_interfaces",
        type=values.names,
        action="extend",
        metavar="NIC",
        help="One of them; may be repeated.",
    )
    group.add_argument(
        "-p",
        "--ssh-port",
        type=values.whole_number(1, 65535),
        metavar="PORT",
        help="Port of the other hosts' ssh server (default: what the ssh configuration says).",
    )
    group.add_argument(
        "-i",
        "--ssh-identity-file",
        type=values.readable_file,
        metavar="FILE",
        help="Private key for ssh (default: what the ssh configuration says).",
    )
    group.add_argument(
        "--start-command",
        type=values.start_command,
        metavar="COMMAND",
        help="Run this in place of ssh to start a program on a host: 'kubectl exec -i {host} --', "
        "'oc rsh -T {host}'. {host} stands for its name; the program and its arguments follow. It "
        "must pass stdin on (default: srun inside a Slurm job, elsewhere ssh).",
    )
    group.add_argument(
        "--listen",
        type=values.endpoint,
        metavar="[ADDRESS:]PORT",
        help="Start nothing on other hosts, but wait here until horovodrun --join has run on them: "
        "on those of -H, or, where it names no others, until there are -np slots (default: none).",
    )
    group.add_argument(
        "--join",
        type=values.endpoint,
        metavar="HOST:PORT",
        help="Be a host of the job that waits there, instead of running COMMAND. -H NAME:SLOTS "
        "says what this machine is called, and how many processes it takes (default: its name, "
        "and 1).",
    )
    group.add_argument(
        "--secret-file",
        type=values.text,
        metavar="FILE",
        help="The secret that proves a host which joins; --listen makes the file if there is none "
        "(default: _HOROVOD_SECRET_KEY).",
    )
    group.add_argument(
        "--disable-cache",
        action="store_true",
        help="Accepted for compatibility: no result of a check is kept between jobs.",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-filename",
        type=values.text,
        metavar="DIR",
        help="Also write each rank's output, as it is, to DIR/rank.<n>/stdout and stderr.",
    )
    group.add_argument(
        "--output-ranks",
        type=values.ranks,
        metavar="RANKS",
        help="Show only the output of these ranks, such as 0,2-3; files get that of all "
        "(default: all).",
    )
    group.add_argument(
        "--attach",
        type=values.rank,
        metavar="RANK",
        help="Give this rank the launcher's stdin, and show its output as it is: for breakpoint() "
        "and input().",
    )
    group.add_argument(
        "--progress",
        action="store_true",
        help="Show on the last line of the terminal the step that the job is in, steps per second, "
        "and which rank is slow and why; where there is no terminal, every 30 seconds.",
    )
    group.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_timestamp",
        action="store_true",
        help="Put the time before the [rank]<stream>: of each line.",
    )
    group.add_argument(
        "--verbose",
        action="count",
        default=0,
        help="Say what is started, where, with which variables, and how it ended; given twice, "
        "also the commands that reach the hosts, the addresses found, and every event of an "
        "elastic job (default: failures, changes of an elastic job, and who is awaited).",
    )


def _add_scaling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--scaling",
        type=values.sizes,
        metavar="N,N,...",
        help="Run COMMAND with each of these numbers of processes in turn, instead of -np, and "
        "print time, steps per second, speed-up and efficiency. Every rank is to have the same "
        "work at every size (weak scaling), unless --strong is given.",
    )
    group.add_argument(
        "--strong",
        action="store_true",
        help="The whole work is the same at every size. COMMAND divides it: by the number of "
        "ranks, as DistributedSampler does, or by HOROVOD_SCALING_FRACTION, which is 1/N (without "
        "--strong: 1.0).",
    )
    group.add_argument(
        "--repeat",
        type=values.whole_number(1),
        metavar="R",
        help="Run every size R times, in turns, and take medians (default: 1).",
    )
    group.add_argument(
        "--scaling-published",
        type=values.readable_file,
        metavar="FILE",
        help="CSV file with the columns ranks and seconds: somebody else's run, or the file of an "
        "earlier study, to show beside this one (default: none).",
    )
    group.add_argument(
        "--scaling-output",
        type=values.text,
        metavar="PREFIX",
        help="Write the table to PREFIX.csv and a chart to PREFIX.png (default: scaling). The "
        "chart needs matplotlib: pip install matplotlib.",
    )


def _add_launchers(group: argparse._ArgumentGroup) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--gloo",
        dest="use_gloo",
        action="store_true",
        help="Start the processes directly and through ssh (the default).",
    )
    which.add_argument(
        "--mpi", dest="use_mpi", action="store_true", help="Start them with mpirun instead."
    )
    which.add_argument(
        "--jsrun",
        dest="use_jsrun",
        action="store_true",
        help="Start them with jsrun instead, inside an LSF job.",
    )
    group.add_argument(
        "--cpu-bind",
        choices=("none", "core", "numa"),
        default="none",
        metavar="HOW",
        help="Bind each process to its share of the host's cores (core), or to a NUMA node (numa) "
        "(default: none).",
    )


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_num_proc",
        type=values.whole_number(1),
        metavar="N",
        help="Fewest processes with which the job goes on (default: -np).",
    )
    group.add_argument(
        "--max-np",
        "--max-num-proc",
        dest="max_num_proc",
        type=values.whole_number(1),
        metavar="N",
        help="Most processes that it uses (default: as many as there are slots).",
    )
    group.add_argument(
        "--slots-per-host",
        type=values.whole_number(1),
        metavar="N",
        help="Slots of a host for which none are given (default: each must say).",
    )
    group.add_argument(
        "--reset-limit",
        type=values.whole_number(0),
        metavar="N",
        help="Changes of membership after which the job ends; 0 allows none (default: no limit).",
    )
    group.add_argument(
        "--blacklist-cooldown-range",
        nargs=2,
        type=values.whole_number(1, 3600),
        metavar=("MIN", "MAX"),
        help="Seconds, 1 to 3600, after which a host that failed may be used again; the wait "
        "grows from MIN to MAX (default: never again).",
    )
    group.add_argument(
        "--max-worker-failures",
        type=values.whole_number(1),
        metavar="N",
        help="Failed processes after which a host is not used any more "
        f"(default: {DEFAULT_WORKER_FAILURES}).",
    )
    group.add_argument(
        "--status-file",
        type=values.new_file,
        metavar="FILE",
        help="Append what happens (hosts, workers, decisions, failures) to this file, one JSON "
        "object a line (default: none).",
    )


def _add_mpi(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mpi-args",
        type=values.text,
        metavar="ARGS",
        help="More arguments for mpirun, in one piece: --mpi-args='-x NAME'.",
    )
    group.add_argument(
        "--binding-args",
        type=values.text,
        metavar="ARGS",
        help="Arguments for mpirun that bind processes to cores, in one piece, instead of the "
        "usual ones: --binding-args='--bind-to core'.",
    )
    group.add_argument(
        "--tcp",
        dest="tcp_flag",
        action="store_true",
        help="No InfiniBand: NCCL and Spectrum MPI talk over TCP only.",
    )


def _add_information(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-h",
        "--help",
        action="version",  # it prints a text and ends the program
        version=syntax.SHORT_HELP,
        help="Show the options that most jobs need, with examples, and exit.",
    )
    group.add_argument("--help-all", action="help", help="Show all options and exit.")
    group.add_argument("-v", "--version", action="store_true", help="Show the version and exit.")
    group.add_argument(
        "-cb",
        "--check-build",
        action="store_true",
        help="Show which frameworks, clusters, controllers, tensor operations and devices work "
        "here, and exit.",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="Check in some seconds whether a job could run on the hosts, and exit: a row for each "
        "with versions, devices, clock, addresses, ports and speed of the network, and a sentence "
        "for whatever is wrong. The exit status is 1 if a job would fail.",
    )
    group.add_argument(
        "--completion",
        choices=SHELLS,
        metavar="SHELL",
        help="Print a script that completes these options in bash, zsh or fish, and exit.",
    )


def _add_tunable(group: argparse._ArgumentGroup, row: Tunable) -> None:
    text = help_text(row).replace("%", "%%")
    if not row.opposite:
        group.add_argument(row.flag, metavar=row.metavar, type=row.parse, help=text)
        return
    pair = group.add_mutually_exclusive_group()
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
