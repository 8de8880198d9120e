"""How the command line of ``horovodrun`` is read, beyond what argparse does.

`options.parser` builds its parser on `Parser`; `arguments` calls `complete` before it parses.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from horovod.runner.dashboard.address import looks_like_address
from horovod.runner.options.tunables import TUNABLES


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        columns = min(100, max(80, shutil.get_terminal_size().columns))
        super().__init__(prog, max_help_position=28, width=columns - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """``-np, --num-proc N``: the argument once, not behind every spelling."""
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


class ShowText(argparse.Action):
    """A switch that prints a text and ends the program."""

    def __init__(self, *, text: str, dest: str, option_strings: Sequence[str], help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)
        self.text = text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        sys.stdout.write(self.text)
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Tells a mistake to its caller, which may be a program and not a person."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """What the option's type makes of it: a `ValueError` of ours says what is wrong."""
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except ValueError as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def give_up(self, message: str) -> NoReturn:
        """End the program with status 2, the usage and this message."""
        super().error(message)


def complete(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments with ``=on`` behind an option whose value may be left out, and is.

    argparse would take the command for its value. Everything from the command on stays as it is.
    """
    optional = {row.flag for row in TUNABLES if row.value_optional}
    known = parser._option_string_actions
    found = list(argv)
    index = 0
    while index < len(found) and found[index].startswith("-") and found[index] != "--":
        flag, given, _ = found[index].partition("=")
        longer = [name for name in known if name.startswith(flag)] if flag[:2] == "--" else []
        flag = longer[0] if flag not in known and len(longer) == 1 else flag
        if flag in optional and not given:
            following = found[index + 1 : index + 2]
            value = following[0] if following and looks_like_address(following[0]) else ""
            found[index : index + 1 + bool(value)] = [f"{flag}={value or 'on'}"]
        elif flag in known and not given:
            number = known[flag].nargs
            index += 1 if number is None else int(number)
        index += 1
    return found
