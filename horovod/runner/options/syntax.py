"""Extend argparse for ``horovodrun``: its parser, its actions, and the texts of its help.

`options.parser` builds its parser on `Parser`, and shows the texts with ``--help`` and
``--help-all``; `arguments` calls `fill_in_values` before it parses.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from horovod.observe.dashboard.watching import looks_like_address
from horovod.runner.options.tunables import TUNABLES


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats the help for terminals of 80 to 100 columns."""

    def __init__(self, prog: str) -> None:
        columns = min(100, max(80, shutil.get_terminal_size().columns))
        super().__init__(prog, max_help_position=28, width=columns - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Show the argument once, as in ``-np, --num-proc N``, not behind every spelling."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        arguments = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {arguments}"


class Deprecated(argparse.Action):
    """An older spelling of a switch."""

    def __init__(self, *, instead: str, **how: Any) -> None:
        super().__init__(nargs=0, help=argparse.SUPPRESS, **how)
        self.instead = instead

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.const)
        namespace.notices.append(f"{option_string} is deprecated; use {self.instead}")


class Parser(argparse.ArgumentParser):
    """A parser that raises `ValueError`, because its caller may be a program and not a person."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert an argument, and keep the reason of a `ValueError`, which argparse would drop."""
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except ValueError as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def give_up(self, message: str) -> NoReturn:
        """End the program with status 2, the usage and this message."""
        super().error(message)


def fill_in_values(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Add ``=on`` to each option whose value is optional and missing.

    argparse would otherwise take the command for its value. Everything from the command on stays as
    it is.
    """
    optional = {row.flag for row in TUNABLES if row.value_optional}
    known = parser._option_string_actions
    words = list(argv)
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        flag, given, _ = words[index].partition("=")
        longer = [name for name in known if name.startswith(flag)] if flag[:2] == "--" else []
        flag = longer[0] if flag not in known and len(longer) == 1 else flag
        if flag in optional and not given:
            following = words[index + 1 : index + 2]
            value = following[0] if following and looks_like_address(following[0]) else ""
            words[index : index + 1 + bool(value)] = [f"{flag}={value or 'on'}"]
        elif flag in known and not given:
            number = known[flag].nargs
            index += 1 if number is None else int(number)
        index += 1
    return words


USAGE = "horovodrun -np N [options] COMMAND [ARGUMENT ...]"

SHORT_HELP = f"""\
usage: {USAGE}

Run COMMAND as N processes that train together. Options come before COMMAND.

  -np N                  how many processes
  -H HOST:SLOTS,...      where, through ssh, or srun in a Slurm job (default:
                         the batch job's hosts, else all on this machine)
  --output-ranks RANKS   show only the output of these ranks, such as 0,2-3
  --output-filename DIR  also write each rank's output to files under DIR
  --progress             show step, steps per second and slow ranks on one line
  --dashboard            serve a live page about the job
  --scaling 1,2,4        run at several sizes, and print what that gains
  --min-np N             elastic: go on while N processes are left
  --dry-run              show what would be started, and start nothing
  --check                check whether a job could run on the hosts, and why not
  --check-build          show which frameworks and devices work here

examples:
  horovodrun -np 2 python train.py --lr 0.1
  horovodrun -np 8 -H node1:4,node2:4 python train.py
  horovodrun -np 4 --output-ranks 0 --output-filename logs python train.py
  horovodrun -np 4 --min-np 2 --host-discovery-script ./hosts python train.py

Ctrl-C once interrupts the processes, twice kills them.
horovodrun --help-all explains all options, and docs/horovodrun.md some more.
"""

DESCRIPTION = """\
Run COMMAND as N processes that train together. Each finds its place through
hvd.init(). Options of horovodrun come before COMMAND; everything from COMMAND
on is passed to it untouched.
"""

EXAMPLES = """\
examples:
  two processes on this machine:
    horovodrun -np 2 python train.py --lr 0.1
  four on each of two hosts, through ssh:
    horovodrun -np 8 -H node1:4,node2:4 python train.py
  the same, with the hosts as a range or in a file:
    horovodrun -np 8 -H 'node[1-2]:4' python train.py
    horovodrun -np 8 --hostfile hosts.txt python train.py
  show what would be started, and where:
    horovodrun -np 8 -H 'node[1-2]:4' --dry-run python train.py
  keep each rank's output under logs/rank.<n>/ and show only that of rank 0:
    horovodrun -np 4 --output-filename logs --output-ranks 0 python train.py
  stop at breakpoint() in rank 0, and talk to the debugger:
    horovodrun -np 2 --attach 0 python train.py
  go on when hosts are lost, and use new ones:
    horovodrun -np 8 --min-np 4 --host-discovery-script ./hosts python train.py
  the same training on 1, 2, 4 and 8 processes, three times each, as a table:
    horovodrun --scaling 1,2,4,8 --repeat 3 --strong python train.py
  see whether a job could run on these hosts, and what is wrong with them:
    horovodrun --check -H node1:4,node2:4
  what is usable on this machine:
    horovodrun --check-build

One rank that fails ends the others; the exit status is that of the first to
fail (128 + n after signal n), and its last lines of stderr are shown at the
end. Ctrl-C once interrupts the workers, twice kills them. An option beats the
configuration file, which beats environment variables (HOROVOD_*).
"""
