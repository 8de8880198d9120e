"""Every knob of Horovod, declared once.

`Config` is the table: a field is the variable ``HOROVOD_<FIELD>`` with its type, default, lower
bound and meaning. The engine and the launcher read it through `Config.from_env`; the launcher
makes its options, and ``python -m horovod.common.config`` makes docs/knobs.md, from `KNOBS`.

A variable that is unset or empty has its default. A value that cannot be understood is a
`ValueError` naming the variable, because a typing error that silently means "default" costs a
day on a cluster.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod.common.logging import LEVELS, get_logger, log_once

PREFIX = "HOROVOD_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _knob(
    default: Any,
    section: str,
    help_text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    metadata = {
        "section": section,
        "help": help_text,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
    }
    return dataclasses.field(default=default, metadata=metadata)


_ENGINE = "Engine"
_TRANSPORT = "Transports"
_WATCH = "Seeing what happens"
_LAUNCH = "Starting"
_TUNE = "Autotuning"
_COMPAT = "Accepted for compatibility"


@dataclass(frozen=True)
class Config:
    """The knobs of this process; immutable."""

    fusion_threshold: int = _knob(
        134217728,
        _ENGINE,
        "Bytes of tensors that may run as one fused operation; 0 disables fusion.",
        minimum=0,
    )
    cycle_time: float = _knob(
        1.0,
        _ENGINE,
        "Milliseconds for which asynchronous requests are gathered before they run.",
        minimum=0,
    )
    cache_capacity: int = _knob(
        1024, _ENGINE, "Entries of the cache of agreed requests; 0 disables it.", minimum=0
    )
    overlap_backward: bool | None = _knob(
        None,
        _ENGINE,
        "Whether gradients are reduced while backward goes on. Unset: on accelerators; in host "
        "memory where the first steps show that it is faster.",
    )
    disable_group_fusion: bool = _knob(
        False, _ENGINE, "Fuse the tensors of a group only with each other."
    )
    dynamic_process_sets: bool = _knob(
        False, _ENGINE, "Allow process sets to be added and removed after `init`."
    )
    elastic: bool = _knob(
        False, _ENGINE, "The job may lose and gain ranks (set by the elastic launcher)."
    )
    enable_async_completion: bool = _knob(
        False,
        _ENGINE,
        "Complete operations on accelerator tensors by events, without waiting on the host.",
    )
    thread_affinity: str | None = _knob(
        None,
        _ENGINE,
        "Comma-separated core ids, one for each local rank, to which the background "
        "thread is bound.",
    )

    keep_heap: bool = _knob(
        True,
        _ENGINE,
        "Let glibc, and torch's own allocator, keep the memory that training frees. 0: as they do "
        "by themselves.",
    )
    huge_pages: bool = _knob(
        True,
        _ENGINE,
        "Put that memory on huge pages in the first steps. 0: leave it as it is.",
    )

    cpu_operations: str | None = _knob(
        None,
        _TRANSPORT,
        "What moves CPU tensors. Unset: shared memory inside a host, TCP between hosts. `gloo` "
        "is upstream's name for TCP, and `ccl` means the same.",
        choices=("shm", "gloo", "mpi", "ccl"),
    )
    shm_peer_memory: bool = _knob(
        True,
        _TRANSPORT,
        "Whether ranks of one host read and write each other's memory directly (one copy) where "
        "the kernel allows it. 0: stage large tensors through shared memory, and open no memory.",
    )
    controller: str | None = _knob(
        None,
        _TRANSPORT,
        "What moves the control messages. Unset: chosen with the transport.",
        choices=("gloo", "mpi"),
    )
    hierarchical_allreduce: bool | None = _knob(
        None,
        _TRANSPORT,
        "Reduce inside hosts first, then between them. Unset: on as soon as some "
        "host of several has more than one rank.",
    )
    hierarchical_allgather: bool | None = _knob(None, _TRANSPORT, "The same for allgather.")
    torus_allreduce: bool | None = _knob(
        None, _TRANSPORT, "Two-dimensional allreduce on accelerators of several hosts."
    )
    gloo_timeout_seconds: float = _knob(
        30.0,
        _TRANSPORT,
        "Seconds for which ranks of several hosts wait for each other to connect, and for a host "
        "that does not answer any more.",
        minimum=0.001,
    )
    gloo_iface: str | None = _knob(
        None, _TRANSPORT, "Network interface for connections between hosts, such as `eth0`."
    )
    num_nccl_streams: int = _knob(
        1, _TRANSPORT, "Communicators used in turn for accelerator tensors.", minimum=1
    )
    mpi_threads_disable: bool = _knob(False, _TRANSPORT, "Initialise MPI without thread support.")

    timeline: str | None = _knob(
        None,
        _WATCH,
        "File for the timeline, or `DYNAMIC` to start it from the program. Each rank writes one; "
        "`python -m horovod.timeline report` explains them.",
    )
    timeline_mark_cycles: bool = _knob(False, _WATCH, "Mark the cycles in the timeline.")
    stall_check_disable: bool = _knob(False, _WATCH, "Never report stalled operations.")
    stall_check_time_seconds: float = _knob(
        60.0,
        _WATCH,
        "Seconds after which an operation that some ranks wait for is reported.",
        minimum=0.001,
    )
    stall_shutdown_time_seconds: float = _knob(
        0.0,
        _WATCH,
        "Seconds after which such an operation ends the job; 0: never. At least the "
        "time of the report.",
        minimum=0,
    )
    check_nan: bool = _knob(
        False,
        _WATCH,
        "Before every optimizer step, look for NaN and infinity in each rank's own gradients; if "
        "there are any, all ranks raise an error that names the ranks and parameters.",
    )
    dashboard: str | None = _knob(
        None,
        _WATCH,
        "Where the launcher serves a page about the job: `ADDRESS:PORT`, or `on` for "
        "127.0.0.1:8470; see docs/dashboard.md.",
    )
    dashboard_save: str | None = _knob(
        None, _WATCH, "HTML file to which that page is saved when the job ends."
    )
    dashboard_token_file: str | None = _knob(
        None,
        _WATCH,
        "File whose first line is the token of that page. Unset: a new token for every job, in the "
        "link that is printed.",
    )
    stats_interval: float | None = _knob(
        None,
        _WATCH,
        "Seconds between reports of each rank's numbers (`hvd.stats()`) to the launcher's store. "
        "Unset: no reports. `--dashboard` sets it.",
        minimum=0.01,
    )
    log_level: str = _knob(
        "warning",
        _WATCH,
        "Least severe level shown; anything else means `warning`.",
        choices=tuple(LEVELS),
    )
    log_hide_time: bool = _knob(False, _WATCH, "No time in log lines.")

    start_timeout: float = _knob(
        30.0, _LAUNCH, "Seconds within which all ranks must have started and met.", minimum=0.001
    )
    spark_start_timeout: float = _knob(
        600.0,
        _LAUNCH,
        "Seconds within which Spark must have started all tasks of `horovod.spark.run`; read by "
        "the Spark driver.",
        minimum=0.001,
    )
    elastic_timeout: float = _knob(
        600.0, _LAUNCH, "Seconds for which an elastic job waits for enough hosts.", minimum=0.001
    )
    elastic_answer_timeout: float = _knob(
        30.0,
        _LAUNCH,
        "Seconds after which a process of an elastic job that does not notice changes is killed.",
        minimum=0.001,
    )

    autotune: bool = _knob(
        False,
        _TUNE,
        "While training, search for the fastest way to reduce gradients; knobs that are set stay "
        "as they are. See docs/autotune.md.",
    )
    autotune_log: str | None = _knob(None, _TUNE, "CSV file for the samples, of rank 0.")
    autotune_warmup_samples: int = _knob(3, _TUNE, "Samples discarded first.", minimum=0)
    autotune_steps_per_sample: int = _knob(10, _TUNE, "Steps measured for a sample.", minimum=1)
    autotune_bayes_opt_max_samples: int = _knob(
        20, _TUNE, "Most settings that the search tries.", minimum=1
    )

    batch_d2d_memcopies: bool = _knob(
        True, _COMPAT, "Batched copies into the fusion buffer; there is no such kernel to switch."
    )
    autotune_gaussian_process_noise: float = _knob(
        0.8,
        _COMPAT,
        "Without effect, 0 to 1: autotuning uses no Gaussian process.",
        minimum=0,
        maximum=1,
    )
    ccl_cache: bool = _knob(False, _COMPAT, "oneCCL is not used.")
    disable_nvtx_ranges: bool = _knob(
        False, _WATCH, "No NVTX ranges, even where a tool takes them."
    )
    adasum_mpi_chunk_size: int = _knob(
        1 << 30, _COMPAT, "Adasum does not send in chunks.", minimum=1
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """The knobs as the environment sets them."""
        values: dict[str, Any] = {}
        for knob in KNOBS:
            text = environ.get(knob.env, "").strip()
            if text:
                values[knob.name] = knob.parse(text)
        if values.get("cpu_operations") == "ccl":
            log_once(
                get_logger(__name__),
                LEVELS["warning"],
                "cpu_operations=ccl",
                "HOROVOD_CPU_OPERATIONS=ccl: oneCCL is not used here, TCP takes its place",
            )
            values["cpu_operations"] = "gloo"
        config = cls(**values)
        if 0 < config.stall_shutdown_time_seconds < config.stall_check_time_seconds:
            log_once(
                get_logger(__name__),
                LEVELS["warning"],
                "stall_shutdown_time",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is ignored: it is shorter than "
                "HOROVOD_STALL_CHECK_TIME_SECONDS",
            )
            config = dataclasses.replace(config, stall_shutdown_time_seconds=0.0)
        return config


def chosen(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The knobs that the environment sets, be it to their defaults: autotuning keeps them."""
    return frozenset(knob.name for knob in KNOBS if environ.get(knob.env, "").strip())


@dataclass(frozen=True)
class Knob:
    """One row of the table."""

    name: str
    type: type
    optional: bool
    default: Any
    section: str
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]

    @property
    def env(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    def parse(self, text: str) -> Any:
        """The value that ``text`` stands for; `ValueError` naming the variable."""
        try:
            value = _PARSERS[self.type](text)
        except ValueError:
            raise ValueError(f"{self.env}={text!r} is not {_KINDS[self.type]}") from None
        if self.choices:
            value = value.lower()
            if value not in self.choices:
                if self.name == "log_level":  # upstream's rule: a bad level must not end a job
                    return self.default
                expected = ", ".join(self.choices)
                raise ValueError(f"{self.env}={text!r} is not one of {expected}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.env}={text} is below the least allowed value {self.minimum:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.env}={text} is above the greatest value {self.maximum:g}")
        return value


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    return int(text) > 0


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_PARSERS: dict[type, Any] = {bool: _parse_bool, int: int, float: _parse_float, str: str}
_KINDS = {bool: "a yes or no (1 or 0)", int: "a whole number", float: "a number", str: "text"}


def _make_knobs() -> tuple[Knob, ...]:
    hints = typing.get_type_hints(Config)
    knobs = []
    for field in dataclasses.fields(Config):
        hint = hints[field.name]
        optional = isinstance(hint, types.UnionType)
        knobs.append(
            Knob(
                name=field.name,
                type=typing.get_args(hint)[0] if optional else hint,
                optional=optional,
                default=field.default,
                section=field.metadata["section"],
                help=field.metadata["help"],
                minimum=field.metadata["minimum"],
                maximum=field.metadata["maximum"],
                choices=field.metadata["choices"],
            )
        )
    return tuple(knobs)


KNOBS: tuple[Knob, ...] = _make_knobs()

IDENTITY: tuple[tuple[str, str], ...] = (
    ("HOROVOD_RANK, HOROVOD_SIZE", "This process's rank and the number of ranks."),
    ("HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE", "The same among the ranks of this host."),
    (
        "HOROVOD_CROSS_RANK, HOROVOD_CROSS_SIZE",
        "The same among the hosts that have a process of this local rank.",
    ),
    ("HOROVOD_HOSTNAME", "This host's name as the launcher knows it."),
    (
        "HOROVOD_WORKER_ID",
        "This process's name in an elastic job, whose driver decides about ranks while it runs.",
    ),
    (
        "HOROVOD_GLOO_RENDEZVOUS_ADDR, HOROVOD_GLOO_RENDEZVOUS_PORT",
        "Where the launcher serves the job's store.",
    ),
    ("_HOROVOD_SECRET_KEY", "The job's key in base64. Keep it out of logs and command lines."),
)
"""Variables that launchers set for each rank, which are no knobs."""


def knobs_page() -> str:
    """docs/knobs.md."""
    lines = [
        "# Environment variables",
        "",
        "<!-- Generated by `python -m horovod.common.config`: edit horovod/common/config.py. -->",
        "",
        "Unset or empty means the default. Yes-or-no values are 1 or 0 (also true/false, yes/no,",
        "on/off). A value that cannot be understood is an error at `init`.",
    ]
    for section in dict.fromkeys(knob.section for knob in KNOBS):
        lines += ["", f"## {section}", ""]
        if section == _COMPAT:
            lines += ["Known to upstream; they are read and checked but change nothing.", ""]
        lines += ["| Variable | Type | Default | Meaning |", "|---|---|---|---|"]
        lines += [_row(knob) for knob in KNOBS if knob.section == section]
    lines += ["", "## Set by launchers", "", "| Variable | Meaning |", "|---|---|"]
    for names, meaning in IDENTITY:
        quoted = ", ".join(f"`{name}`" for name in names.split(", "))
        lines.append(f"| {quoted} | {meaning} |")
    return "\n".join(lines) + "\n"


def _row(knob: Knob) -> str:
    kind = ", ".join(f"`{choice}`" for choice in knob.choices)
    if not kind:
        kind = {bool: "yes or no", int: "integer", float: "number", str: "text"}[knob.type]
    if knob.type is bool and knob.default is not None:
        default = "1" if knob.default else "0"
    elif knob.type is float and knob.default is not None:
        default = f"{knob.default:g}"
    else:
        default = "unset" if knob.default is None else str(knob.default)
    least = "" if knob.minimum in (None, 0) or knob.type is float else f" At least {knob.minimum}."
    return f"| `{knob.env}` | {kind} | {default} | {knob.help}{least} |"


if __name__ == "__main__":
    sys.stdout.write(knobs_page())
