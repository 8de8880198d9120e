"""The options that set a variable of the core: one row each.

`arguments` adds them to the parser, `launch` puts what they say into the workers' environment.
Type, lower bound, default and (unless the row words it better) the help text are those of the
knob in `horovod.common.config`, so that a value the core would refuse is refused here, before
anything starts. An option that is not given leaves the variable as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from horovod.common.config import KNOBS, Knob

_KNOBS = {knob.env: knob for knob in KNOBS}
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Tunable:
    """One row: an option, the variable it sets, and how its value becomes the variable's.

    A row with ``opposite`` is a switch: ``flag`` sets the variable to 1, ``opposite`` to 0, and
    an opposite that merely repeats the default is left out of the help.
    """

    section: str
    flag: str
    env: str
    metavar: str = ""
    help: str = ""
    transform: Callable[[float], str] = str
    opposite: str = ""
    hide_opposite: bool = False
    choices: tuple[str, ...] = ()
    only_with: str = ""  # the variable without which this one has no effect

    @property
    def knob(self) -> Knob:
        return _KNOBS[self.env]


_TUNE = "tuning"
_TIMELINE = "timeline (a trace to open in chrome://tracing or ui.perfetto.dev)"
_STALL = "stall check"
_TIME = "time limits"
_LOG = "logging"

TUNABLES = (
    Tunable(
        _TUNE,
        "--fusion-threshold-mb",
        "HOROVOD_FUSION_THRESHOLD",
        "MB",
        "Mebibytes of tensors that may run as one fused operation; 0 disables fusion "
        "(default: 128).",
        transform=lambda megabytes: str(int(megabytes) * 1024 * 1024),
    ),
    Tunable(
        _TUNE,
        "--cycle-time-ms",
        "HOROVOD_CYCLE_TIME",
        "MS",
        transform=lambda milliseconds: str(float(milliseconds)),
    ),
    Tunable(_TUNE, "--cache-capacity", "HOROVOD_CACHE_CAPACITY", "ENTRIES"),
    Tunable(
        _TUNE,
        "--hierarchical-allreduce",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        help="Reduce inside hosts first, then between them (default: where there are several hosts "
        "and some run several processes).",
        opposite="--no-hierarchical-allreduce",
    ),
    Tunable(
        _TUNE,
        "--hierarchical-allgather",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        help="The same for allgather.",
        opposite="--no-hierarchical-allgather",
    ),
    Tunable(
        _TIMELINE,
        "--timeline-filename",
        "HOROVOD_TIMELINE",
        "FILE",
    ),
    Tunable(
        _TIMELINE,
        "--timeline-mark-cycles",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        opposite="--no-timeline-mark-cycles",
        hide_opposite=True,
        only_with="HOROVOD_TIMELINE",
    ),
    Tunable(
        _STALL,
        "--no-stall-check",
        "HOROVOD_STALL_CHECK_DISABLE",
        opposite="--stall-check",
        hide_opposite=True,
    ),
    Tunable(
        _STALL, "--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", "SECONDS"
    ),
    Tunable(
        _STALL,
        "--stall-check-shutdown-time-seconds",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "SECONDS",
    ),
    Tunable(_TIME, "--start-timeout", "HOROVOD_START_TIMEOUT", "SECONDS"),
    Tunable(_TIME, "--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", "SECONDS"),
    Tunable(_LOG, "--log-level", "HOROVOD_LOG_LEVEL", "LEVEL", choices=_LEVELS),
    Tunable(
        _LOG,
        "--log-without-timestamp",
        "HOROVOD_LOG_HIDE_TIME",
        opposite="--log-with-timestamp",
        hide_opposite=True,
    ),
)


def add_tunables(parser: argparse.ArgumentParser) -> None:
    """Add every row's option; the parsed value is the text for the variable, or None."""
    sections: dict[str, argparse._ArgumentGroup] = {}
    for row in TUNABLES:
        if row.section not in sections:
            sections[row.section] = parser.add_argument_group(row.section)
        if row.opposite:
            _add_switch(sections[row.section], row)
        else:
            sections[row.section].add_argument(
                row.flag, dest=row.env, metavar=row.metavar, type=_parser(row), help=_help(row)
            )


def chosen(options: argparse.Namespace) -> dict[str, str]:
    """The variables for which an option was given."""
    values = {row.env: getattr(options, row.env) for row in TUNABLES}
    return {env: value for env, value in values.items() if value is not None}


def without_effect(values: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables among ``values`` that do nothing without another, and why, for people."""
    return {
        row.env: f"{row.flag} has no effect without {_flag_of(row.only_with)}"
        for row in TUNABLES
        if row.env in values
        and row.only_with
        and not (values.get(row.only_with) or environ.get(row.only_with))
    }


def _flag_of(env: str) -> str:
    return next(row.flag for row in TUNABLES if row.env == env)


def _add_switch(section: argparse._ArgumentGroup, row: Tunable) -> None:
    pair = section.add_mutually_exclusive_group()
    pair.add_argument(row.flag, dest=row.env, action="store_const", const="1", help=_help(row))
    pair.add_argument(
        row.opposite,
        dest=row.env,
        action="store_const",
        const="0",
        help=argparse.SUPPRESS if row.hide_opposite else f"The opposite of {row.flag}.",
    )


def _parser(row: Tunable) -> Callable[[str], str]:
    """What argparse applies to the option's argument; its complaints name the option."""

    def parse(text: str) -> str:
        if row.choices:
            if text.upper() not in row.choices:
                raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(row.choices)}")
            return text.upper()
        if row.knob.type is str:
            if not text:
                raise argparse.ArgumentTypeError("must not be empty")
            return text
        value = _number(text, whole=row.knob.type is int)
        rendered = row.transform(value)
        try:
            row.knob.parse(rendered)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return rendered

    return parse


def _number(text: str, *, whole: bool) -> float:
    try:
        value: float = int(text)
    except ValueError:
        try:
            if whole:
                raise
            value = float(text)
        except ValueError:
            kind = "a whole number" if whole else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def _help(row: Tunable) -> str:
    text = (row.help or row.knob.help).replace("`", "").replace("%", "%%")
    if row.choices:
        return f"Least severe level shown: {', '.join(row.choices)} (default: WARNING)."
    if row.help or row.opposite or row.knob.default is None:
        return text
    return f"{text.rstrip('.')} (default: {row.knob.default:g})."
