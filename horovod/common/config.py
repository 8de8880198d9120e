"""Every knob of Horovod, declared once.

`Config` is the table: a field is the variable ``HOROVOD_<FIELD>`` with its type, default, bounds
and meaning. The engine and the launcher read it through `Config.from_env`; from `KNOBS` the
launcher makes its options, and `knobs_page` makes docs/knobs.md.

A variable that is unset or empty has its default. A value that cannot be understood is a
`ValueError` that names the variable, because a typing error that silently means "default" costs a
day on a cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from horovod.common.logging import LEVELS, get_logger, log_once

COMPATIBILITY = "Accepted for compatibility"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Knob:
    """One row of the table of knobs."""

    name: str
    type: type
    default: Any
    section: str
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @functools.cached_property
    def env(self) -> str:
        """The name of the environment variable."""
        return "HOROVOD_" + self.name.upper()

    def read(self, environ: Mapping[str, str]) -> Any:
        """Return the knob's value in an environment: its default where that does not set it.

        Args:
            environ: The variables.

        Raises:
            ValueError: The variable has a value that cannot be understood, or is out of bounds.
        """
        text = environ.get(self.env, "").strip()
        return self.parse(text) if text else self.default

    def parse(self, text: str) -> Any:
        """Return the value that `text` stands for.

        Args:
            text: The value of the variable, not empty.

        Raises:
            ValueError: The text is not of the knob's type, or the value is out of bounds. The
                message names the variable.
        """
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
    """Return whether a text means yes; as in upstream, so does any number above 0."""
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    return int(text) > 0


def _parse_float(text: str) -> float:
    """Return a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_PARSERS: dict[type, Any] = {bool: _parse_bool, int: int, float: _parse_float, str: str}
_KINDS = {bool: "a yes or no (1 or 0)", int: "a whole number", float: "a number", str: "text"}


def _knob(section: str, default: Any, help_text: str, **limits: Any) -> Any:
    """Return the dataclass field of one knob; `limits` are fields of its `Knob`."""
    metadata = {"section": section, "help": help_text, **limits}
    return dataclasses.field(default=default, metadata=metadata)


_engine = partial(_knob, "Engine")
_transport = partial(_knob, "Transports")
_watch = partial(_knob, "Seeing what happens")
_start = partial(_knob, "Starting")
_autotuning = partial(_knob, "Autotuning")
_compatible = partial(_knob, COMPATIBILITY)


@dataclass(frozen=True)
class Config:
    """The values of all knobs in this process; immutable."""

    fusion_threshold: int = _engine(
        134217728,
        "Bytes of tensors that may run as one fused operation; 0 disables fusion.",
        minimum=0,
    )
    cycle_time: float = _engine(
        1.0, "Milliseconds for which asynchronous requests are gathered before they run.", minimum=0
    )
    cache_capacity: int = _engine(
        1024, "Entries of the cache of agreed requests; 0 disables it.", minimum=0
    )
    overlap_backward: bool | None = _engine(
        None,
        "Whether gradients are reduced while backward goes on. Unset: on accelerators; in host "
        "memory where the first steps show that it is faster.",
    )
    disable_group_fusion: bool = _engine(False, "Fuse the tensors of a group only with each other.")
    dynamic_process_sets: bool = _engine(
        False, "Allow process sets to be added and removed after `init`."
    )
    elastic: bool = _engine(False, "The job may lose and gain ranks (set by the elastic launcher).")
    enable_async_completion: bool = _engine(
        False, "Complete operations on accelerator tensors by events, without waiting on the host."
    )
    thread_affinity: str | None = _engine(
        None,
        "Comma-separated core ids, one for each local rank, to which the background "
        "thread is bound.",
    )

    keep_heap: bool = _engine(
        True,
        "Let glibc, and torch's own allocator, keep the memory that training frees. 0: as they do "
        "by themselves.",
    )
    huge_pages: bool = _engine(
        True, "Put that memory on huge pages in the first steps. 0: leave it as it is."
    )

    cpu_operations: str | None = _transport(
        None,
        "What moves CPU tensors. Unset: shared memory inside a host, TCP between hosts. `gloo` "
        "is upstream's name for TCP, and `ccl` means the same.",
        choices=("shm", "gloo", "mpi", "ccl"),
    )
    shm_peer_memory: bool = _transport(
        True,
        "Whether ranks of one host read and write each other's memory directly (one copy) where "
        "the kernel allows it. 0: stage large tensors through shared memory, and open no memory.",
    )
    controller: str | None = _transport(
        None,
        "What moves the control messages. Unset: chosen with the transport.",
        choices=("gloo", "mpi"),
    )
    hierarchical_allreduce: bool | None = _transport(
        None,
        "Reduce inside hosts first, then between them. Unset: on as soon as some "
        "host of several has more than one rank.",
    )
    hierarchical_allgather: bool | None = _transport(None, "The same for allgather.")
    torus_allreduce: bool | None = _transport(
        None, "Two-dimensional allreduce on accelerators of several hosts."
    )
    gloo_timeout_seconds: float = _transport(
        30.0,
        "Seconds for which ranks of several hosts wait for each other to connect, and for a host "
        "that does not answer any more.",
        minimum=0.001,
    )
    gloo_iface: str | None = _transport(
        None, "Network interface for connections between hosts, such as `eth0`."
    )
    num_nccl_streams: int = _transport(
        1, "Communicators used in turn for accelerator tensors.", minimum=1
    )
    mpi_threads_disable: bool = _transport(False, "Initialise MPI without thread support.")

    timeline: str | None = _watch(
        None,
        "File for the timeline, or `DYNAMIC` to start it from the program. Each rank writes one; "
        "`python -m horovod.timeline report` explains them.",
    )
    timeline_mark_cycles: bool = _watch(False, "Mark the cycles in the timeline.")
    stall_check_disable: bool = _watch(False, "Never report stalled operations.")
    stall_check_time_seconds: float = _watch(
        60.0,
        "Seconds after which an operation that some ranks wait for is reported.",
        minimum=0.001,
    )
    stall_shutdown_time_seconds: float = _watch(
        0.0,
        "Seconds after which such an operation ends the job; 0: never. At least the "
        "time of the report.",
        minimum=0,
    )
    check_nan: bool = _watch(
        False,
        "Before every optimizer step, look for NaN and infinity in each rank's own gradients; if "
        "there are any, all ranks raise an error that names the ranks and parameters.",
    )
    dashboard: str | None = _watch(
        None,
        "Where the launcher serves a page about the job: `ADDRESS:PORT`, or `on` for "
        "127.0.0.1:8470; see docs/dashboard.md.",
    )
    dashboard_save: str | None = _watch(
        None, "HTML file to which that page is saved when the job ends."
    )
    dashboard_token_file: str | None = _watch(
        None,
        "File whose first line is the token of that page. Unset: a new token for every job, in the "
        "link that is printed.",
    )
    stats_interval: float | None = _watch(
        None,
        "Seconds between reports of each rank's numbers (`hvd.stats()`) to the launcher's store. "
        "Unset: no reports. `--dashboard` sets it.",
        minimum=0.01,
    )
    log_level: str = _watch(
        "warning", "Least severe level shown; anything else means `warning`.", choices=tuple(LEVELS)
    )
    log_hide_time: bool = _watch(False, "No time in log lines.")

    start_timeout: float = _start(
        30.0, "Seconds within which all ranks must have started and met.", minimum=0.001
    )
    spark_start_timeout: float = _start(
        600.0,
        "Seconds within which Spark must have started all tasks of `horovod.spark.run`; read by "
        "the Spark driver.",
        minimum=0.001,
    )
    elastic_timeout: float = _start(
        600.0, "Seconds for which an elastic job waits for enough hosts.", minimum=0.001
    )
    elastic_answer_timeout: float = _start(
        30.0,
        "Seconds after which a process of an elastic job that does not notice changes is killed.",
        minimum=0.001,
    )

    autotune: bool = _autotuning(
        False,
        "While training, search for the fastest way to reduce gradients; knobs that are set stay "
        "as they are. See docs/autotune.md.",
    )
    autotune_log: str | None = _autotuning(None, "CSV file for the samples, of rank 0.")
    autotune_warmup_samples: int = _autotuning(3, "Samples discarded first.", minimum=0)
    autotune_steps_per_sample: int = _autotuning(10, "Steps measured for a sample.", minimum=1)
    autotune_bayes_opt_max_samples: int = _autotuning(
        20, "Most settings that the search tries.", minimum=1
    )

    batch_d2d_memcopies: bool = _compatible(
        True, "Batched copies into the fusion buffer; there is no such kernel to switch."
    )
    autotune_gaussian_process_noise: float = _compatible(
        0.8, "Without effect, 0 to 1: autotuning uses no Gaussian process.", minimum=0, maximum=1
    )
    ccl_cache: bool = _compatible(False, "oneCCL is not used.")
    disable_nvtx_ranges: bool = _watch(False, "No NVTX ranges, even where a tool takes them.")
    adasum_mpi_chunk_size: int = _compatible(1 << 30, "Adasum does not send in chunks.", minimum=1)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Return the knobs as the environment sets them.

        Args:
            environ: The variables; by default those of this process.

        Raises:
            ValueError: A variable has a value that cannot be understood, or is out of bounds.
        """
        values = {knob.name: knob.read(environ) for knob in KNOBS}
        if values["cpu_operations"] == "ccl":
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


def chosen_knobs(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the names of the knobs that the environment sets, even if to their defaults.

    Autotuning does not change these.

    Args:
        environ: The variables; by default those of this process.
    """
    return frozenset(knob.name for knob in KNOBS if environ.get(knob.env, "").strip())


def _make_knobs() -> tuple[Knob, ...]:
    """Make the rows of the table from the fields of `Config`."""
    hints = typing.get_type_hints(Config)
    knobs = []
    for field in dataclasses.fields(Config):
        hint = hints[field.name]
        kind = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
        knobs.append(Knob(field.name, kind, field.default, **field.metadata))
    return tuple(knobs)


KNOBS: tuple[Knob, ...] = _make_knobs()

ELASTIC: Knob = next(knob for knob in KNOBS if knob.name == "elastic")
