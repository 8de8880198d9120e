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
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod.common.knob import Knob
from horovod.common.logging import LEVELS, get_logger, log_once


def _knob(
    default: Any,
    section: str,
    help_text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return the dataclass field of one knob."""
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
COMPATIBILITY = "Accepted for compatibility"


@dataclass(frozen=True)
class Config:
    """The values of all knobs in this process; immutable."""

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
        True,
        COMPATIBILITY,
        "Batched copies into the fusion buffer; there is no such kernel to switch.",
    )
    autotune_gaussian_process_noise: float = _knob(
        0.8,
        COMPATIBILITY,
        "Without effect, 0 to 1: autotuning uses no Gaussian process.",
        minimum=0,
        maximum=1,
    )
    ccl_cache: bool = _knob(False, COMPATIBILITY, "oneCCL is not used.")
    disable_nvtx_ranges: bool = _knob(
        False, _WATCH, "No NVTX ranges, even where a tool takes them."
    )
    adasum_mpi_chunk_size: int = _knob(
        1 << 30, COMPATIBILITY, "Adasum does not send in chunks.", minimum=1
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Return the knobs as the environment sets them.

        Args:
            environ: The variables; by default those of this process.

        Raises:
            ValueError: A variable has a value that cannot be understood, or is out of bounds.
        """
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
        optional = isinstance(hint, types.UnionType)
        knobs.append(
            Knob(
                name=field.name,
                type=typing.get_args(hint)[0] if optional else hint,
                optional=optional,
                default=field.default,
                **field.metadata,
            )
        )
    return tuple(knobs)


KNOBS: tuple[Knob, ...] = _make_knobs()

ELASTIC: Knob = next(knob for knob in KNOBS if knob.name == "elastic")
