"""The table of options that set a variable of Horovod's core, with one row each.

A row names the option, the key of the configuration file, and the variable unless it has the
option's name. `options.parser` makes options from it, `config_file` the schema of the file,
docs/site/option_tables.py the documentation, and `jobs.request` the workers' environment. Type,
bounds, default and, unless the row has its own, the help text are those of the knob in
`horovod.common.config`, so that a wrong value is refused before anything starts.

Precedence: an option beats the configuration file, which beats the variable as it is in the
launcher's environment, which beats the default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from horovod.common.config import KNOBS, Config, Knob
from horovod.observe.dashboard.watching import PATTERN

_KNOBS = {knob.env: knob for knob in KNOBS}
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
IB_DISABLE = "NCCL_IB_DISABLE"


@dataclass(frozen=True)
class Tunable:
    """One row: an option, the variable that it sets, and how its value becomes the variable's.

    A row for a bool is a switch: ``flag`` sets the variable to 1 and `opposite` sets it to 0. The
    help omits an opposite that merely repeats the default.
    """

    flag: str
    variable: str = ""  # if it is not HOROVOD_ and the name of the option
    key: str = ""  # its key in the configuration file
    inverse_key: str = ""  # the key with the opposite sense
    metavar: str = ""
    help: str = ""
    transform: Callable[[Any], str] = str  # converts the option's unit to the variable's
    not_flag: str = ""  # the opposite of a switch, if it is not --no-FLAG
    deprecated: tuple[tuple[str, bool], ...] = ()  # older spellings of a switch
    choices: tuple[str, ...] = ()
    pattern: str = ""  # a regular expression that the text must match
    value_optional: bool = False  # without a value the option means "on"
    only_with: str = ""  # the variable without which this one has no effect
    inert_reason: str = ""  # why the option changes nothing

    @property
    def env(self) -> str:
        """The variable."""
        return self.variable or f"HOROVOD_{self.dest.upper()}"

    @property
    def knob(self) -> Knob:
        return _KNOBS[self.env]

    @property
    def dest(self) -> str:
        """The attribute of the parsed options."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def opposite(self) -> str:
        """The option that switches it off; empty if it takes a value."""
        default = "--no-" + self.flag.removeprefix("--") if self.knob.type is bool else ""
        return self.not_flag or default

    def parse(self, text: str) -> Any:
        """Return the option's value; raise `ValueError` with the reason if the text is wrong."""
        if self.choices:
            if text.upper() not in self.choices:
                raise ValueError(f"{text!r} is not one of {', '.join(self.choices)}")
            return text.upper()
        if self.knob.type is bool:
            return self.knob.parse(text)
        if self.knob.type is str:
            if not re.fullmatch(self.pattern or r".+", text, re.DOTALL):
                wanted = f"not of the form {self.metavar}" if text else "empty"
                raise ValueError(f"{text!r} is {wanted}")
            return text
        value = _number(text, whole=self.knob.type is int)
        self.knob.parse(self.transform(value))
        return value

    def render(self, value: Any) -> str:
        """Return the variable's text for a value of the option."""
        return str(int(value)) if self.knob.type is bool else self.transform(value)


ELASTIC = "elastic jobs (made so by --min-np or --host-discovery-script)"
LIBRARIES = "libraries"


def _autotune(name: str, metavar: str, variable: str = "") -> Tunable:
    """Return the row of an option of the search."""
    flag, key = f"--autotune-{name.replace('_', '-')}", f"autotune.{name}"
    return Tunable(flag, variable, key, metavar=metavar, only_with="HOROVOD_AUTOTUNE")


SECTIONS = {
    "tuning": (
        Tunable(
            "--fusion-threshold-mb",
            "HOROVOD_FUSION_THRESHOLD",
            "params.fusion_threshold_mb",
            metavar="MB",
            help="Mebibytes of tensors that may run as one fused operation; 0 disables fusion "
            "(default: 128).",
            transform=lambda megabytes: str(megabytes * 1024 * 1024),
        ),
        Tunable(
            "--cycle-time-ms",
            "HOROVOD_CYCLE_TIME",
            "params.cycle_time_ms",
            metavar="MS",
            transform=lambda milliseconds: str(float(milliseconds)),
        ),
        Tunable("--cache-capacity", key="params.cache_capacity", metavar="ENTRIES"),
        Tunable(
            "--hierarchical-allreduce",
            key="params.hierarchical_allreduce",
            help="Reduce inside hosts first, then between them (default: where there are several "
            "hosts and some run several processes).",
        ),
        Tunable(
            "--hierarchical-allgather",
            key="params.hierarchical_allgather",
            help="The same for allgather.",
        ),
        Tunable(
            "--torus-allreduce",
            key="params.torus_allreduce",
            inert_reason="hierarchical allreduce takes its place",
        ),
    ),
    "autotuning": (
        Tunable(
            "--autotune",
            key="autotune.enabled",
            help="Search for the fastest way to reduce gradients while the job trains. Options "
            "above that are given stay as they are.",
        ),
        _autotune("log_file", "FILE", "HOROVOD_AUTOTUNE_LOG"),
        _autotune("warmup_samples", "SAMPLES"),
        _autotune("steps_per_sample", "STEPS"),
        _autotune("bayes_opt_max_samples", "SAMPLES"),
        _autotune("gaussian_process_noise", "NOISE"),
    ),
    "timeline (a trace to open in chrome://tracing or ui.perfetto.dev)": (
        Tunable("--timeline-filename", "HOROVOD_TIMELINE", "timeline.filename", metavar="FILE"),
        Tunable("--timeline-mark-cycles", key="timeline.mark_cycles", only_with="HOROVOD_TIMELINE"),
    ),
    "dashboard (a live page about the job)": (
        Tunable(
            "--dashboard",
            key="dashboard.address",
            metavar="[ADDRESS:PORT]",
            pattern=PATTERN,
            value_optional=True,
            help="Serve a page about the job: which rank is slow and why, what a step is made of, "
            "what happened (default: none; without ADDRESS:PORT 127.0.0.1:8470, or the next free "
            "port).",
        ),
        Tunable(
            "--dashboard-save",
            key="dashboard.save",
            metavar="FILE",
            only_with="HOROVOD_DASHBOARD",
            help="Save that page, as one HTML file, when the job ends (default: do not).",
        ),
    ),
    "checks": (
        Tunable(
            "--no-stall-check",
            "HOROVOD_STALL_CHECK_DISABLE",
            inverse_key="stall_check.enabled",
            not_flag="--stall-check",
        ),
        Tunable(
            "--stall-check-warning-time-seconds",
            "HOROVOD_STALL_CHECK_TIME_SECONDS",
            "stall_check.warning_time_seconds",
            metavar="SECONDS",
        ),
        Tunable(
            "--stall-check-shutdown-time-seconds",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            "stall_check.shutdown_time_seconds",
            metavar="SECONDS",
        ),
        Tunable("--check-nan"),
    ),
    "time limits": (
        Tunable("--start-timeout", metavar="SECONDS"),
        Tunable(
            "--gloo-timeout-seconds",
            key="library_options.gloo_timeout_seconds",
            metavar="SECONDS",
            help="Seconds that a connection or collective between hosts may take (default: 30).",
        ),
    ),
    ELASTIC: (Tunable("--elastic-timeout", metavar="SECONDS"),),
    LIBRARIES: (
        Tunable("--mpi-threads-disable", key="library_options.mpi_threads_disable"),
        Tunable("--num-nccl-streams", key="library_options.num_nccl_streams", metavar="STREAMS"),
        Tunable(
            "--thread-affinity",
            key="library_options.thread_affinity",
            metavar="CORE[,CORE...]",
            pattern=r"[0-9]+(,[0-9]+)*",
            help="Cores, one for each local rank, to which the background threads are bound "
            "(default: not bound).",
        ),
    ),
    "logging": (
        Tunable(
            "--log-level",
            key="logging.level",
            metavar="LEVEL",
            choices=_LEVELS,
            help=f"Least severe level shown: {', '.join(_LEVELS)} (default: WARNING).",
        ),
        Tunable(
            "--log-without-timestamp",
            "HOROVOD_LOG_HIDE_TIME",
            "logging.hide_timestamp",
            inverse_key="logging.with_timestamp",
            not_flag="--log-with-timestamp",
            deprecated=(("--log-hide-timestamp", True), ("--no-log-hide-timestamp", False)),
        ),
    ),
}
"""The rows, by the title under which the help shows them."""

TUNABLES = tuple(row for rows in SECTIONS.values() for row in rows)


def chosen_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that an option or the configuration file sets."""
    values = {row: getattr(options, row.dest) for row in TUNABLES}
    return {row.env: row.render(value) for row, value in values.items() if value is not None}


def ineffective_variables(values: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables among ``values`` that do nothing without another, with the reason."""
    flags = {row.env: row.flag for row in TUNABLES}
    return {
        row.env: f"{row.flag} has no effect without {flags[row.only_with]}"
        for row in TUNABLES
        if row.env in values
        and row.only_with
        and not _is_on(row.only_with, values.get(row.only_with) or environ.get(row.only_with, ""))
    }


def help_text(row: Tunable) -> str:
    """Return what the help and the page say about the option, with its default."""
    text = (row.help or row.knob.help).replace("`", "")
    if row.inert_reason:
        text += f" No effect: {row.inert_reason}."
    if row.help or row.opposite:
        return text
    default = "none" if row.knob.default is None else f"{row.knob.default:g}"
    return f"{text.rstrip('.')} (default: {default})."


def settings_environment(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for the workers, in addition to ``environ``."""
    values = chosen_variables(options)
    for name in ineffective_variables(values, environ):
        del values[name]
    if options.tcp_flag:
        values[IB_DISABLE] = "1"
    return values


def settings(options: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Return the knobs as the workers will see them; the launcher takes its time limits there."""
    return Config.from_env({**environ, **settings_environment(options, environ)})


def _is_on(env: str, text: str) -> bool:
    knob = _KNOBS[env]
    return bool(text) and (knob.type is not bool or bool(knob.parse(text)))


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
            raise ValueError(f"{text!r} is not {kind}") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"must be 0 or more, not {text}")
    return value
