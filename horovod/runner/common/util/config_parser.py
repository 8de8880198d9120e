"""Knobs on their way from the configuration file and the options to the environment.

The variables are those that `horovod.runner.options.tunables` declares; each name here stands for
itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from horovod.runner.options.config_file import CONTROLLER, schema
from horovod.runner.options.tunables import TUNABLES, settings_environment

HOROVOD_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
HOROVOD_CYCLE_TIME = "HOROVOD_CYCLE_TIME"
HOROVOD_CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
HOROVOD_HIERARCHICAL_ALLREDUCE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
HOROVOD_HIERARCHICAL_ALLGATHER = "HOROVOD_HIERARCHICAL_ALLGATHER"
HOROVOD_TORUS_ALLREDUCE = "HOROVOD_TORUS_ALLREDUCE"
HOROVOD_AUTOTUNE = "HOROVOD_AUTOTUNE"
HOROVOD_AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"
HOROVOD_AUTOTUNE_WARMUP_SAMPLES = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES = "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
HOROVOD_TIMELINE_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
HOROVOD_STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
HOROVOD_STALL_CHECK_TIME_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
HOROVOD_MPI_THREADS_DISABLE = "HOROVOD_MPI_THREADS_DISABLE"
HOROVOD_NUM_NCCL_STREAMS = "HOROVOD_NUM_NCCL_STREAMS"
HOROVOD_THREAD_AFFINITY = "HOROVOD_THREAD_AFFINITY"
HOROVOD_GLOO_TIMEOUT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
HOROVOD_LOG_LEVEL = "HOROVOD_LOG_LEVEL"
HOROVOD_LOG_HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"
NCCL_IB_DISABLE = "NCCL_IB_DISABLE"


def set_args_from_config(
    args: argparse.Namespace, config: Mapping[str, Any], override_args: Collection[str]
) -> None:
    """Set options from a configuration that was read, except `override_args`."""
    controller = config.get(CONTROLLER)
    if controller and not (args.use_gloo or args.use_mpi):
        if controller not in ("gloo", "mpi"):
            raise ValueError(f"controller must be gloo or mpi, not {controller!r}")
        setattr(args, f"use_{controller}", True)
    for key, row in schema().items():
        if row is None or row.dest in override_args:
            continue
        section, _, name = key.partition(".")
        found = (config.get(section) or {}).get(name)
        if found is not None:
            setattr(args, row.dest, not found if key == row.inverse_key else found)


def validate_config_args(args: argparse.Namespace) -> None:
    """`ValueError` naming the option that has no sensible value."""
    for row in TUNABLES:
        value = getattr(args, row.dest, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
            raise ValueError(f"{row.dest}={value} must be >= 0")


def set_env_from_args(env: dict[str, str], args: argparse.Namespace) -> dict[str, str]:
    """Add the variables that the options set to `env`, and return it."""
    env.update(settings_environment(args, env))
    return env
