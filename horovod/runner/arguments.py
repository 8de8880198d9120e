"""The command line of ``horovodrun``: options, help, and what counts as a mistake.

Called by `launch` only. A mistake ends with exit status 2 and a message that says what to type
instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from horovod.runner.hosts import Host, is_local, parse_hosts
from horovod.runner.tunables import add_tunables

_DESCRIPTION = """\
Run COMMAND as N processes that train together. Each process finds its place through hvd.init().
Options of horovodrun come before COMMAND; everything from COMMAND on is passed to it untouched.
"""

_EXAMPLES = """\
examples:
  horovodrun -np 2 python train.py --lr 0.1     two processes on this machine
  horovodrun -np 4 --output-filename logs python train.py
                                                also keep each rank's output under logs/rank.<n>/
  horovodrun -np 2 --timeline-filename trace.json python train.py
                                                record what the collectives did
  horovodrun -np 2 --log-level DEBUG --verbose python train.py
                                                see what is started, and how
  horovodrun --check-build                      what is usable on this machine

One rank that fails ends the others; the exit status is that of the first to fail (128 + n after
signal n), and its last lines of stderr are shown at the end. Ctrl-C once asks the workers to end,
twice kills them. Options beat environment variables (HOROVOD_*); what no option sets is inherited.
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def make_parser() -> argparse.ArgumentParser:
    """The parser, in the order in which ``--help`` shows it."""
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        usage="horovodrun -np N [options] COMMAND [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        add_help=False,
    )
    job = parser.add_argument_group("job")
    job.add_argument(
        "-np", "--num-proc", dest="num_proc", type=_count, metavar="N", help="Number of processes."
    )
    job.add_argument(
        "-H",
        "--hosts",
        dest="hosts",
        type=_hosts,
        metavar="HOST[:SLOTS]",
        help="Where to run: localhost, or localhost:SLOTS to allow at most SLOTS processes "
        "(default: localhost).",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-filename",
        metavar="DIR",
        help="Also write each rank's output, as it is, to DIR/rank.<n>/stdout and stderr.",
    )
    output.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_timestamp",
        action="store_true",
        help="Put the time before the [rank]<stream>: of each line.",
    )
    output.add_argument(
        "--verbose", action="store_true", help="Say what is started, where, and how it ended."
    )
    add_tunables(parser)
    about = parser.add_argument_group("information")
    about.add_argument("-h", "--help", action="help", help="Show this text and exit.")
    about.add_argument("-v", "--version", action="store_true", help="Show the version and exit.")
    about.add_argument(
        "-cb",
        "--check-build",
        action="store_true",
        help="Show which frameworks, controllers and tensor operations work here, and exit.",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ends the program with status 2 where they do not describe a job."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.version or options.check_build:
        return options
    if options.num_proc is None:
        parser.error("say how many processes to run, for example: horovodrun -np 2 python train.py")
    if not options.command or not options.command[0]:
        parser.error(
            f"say what to run, for example: horovodrun -np {options.num_proc} python train.py"
        )
    options.hosts = options.hosts or [Host("localhost")]
    return options


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def _hosts(text: str) -> list[Host]:
    try:
        hosts = parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for host in hosts:
        if not is_local(host.name):
            raise argparse.ArgumentTypeError(
                f"{host.name!r} is another host, and launching on several hosts is not available "
                f"in this version; start the job with mpirun or torchrun instead, hvd.init() "
                f"finds its place under both"
            )
    if len(hosts) > 1:
        names = ", ".join(host.name for host in hosts)
        raise argparse.ArgumentTypeError(f"{names} are all this machine; name it once")
    return hosts
