"""``horovod.spark.run`` and ``run_elastic``: a Spark task for every process of a job.

Users call them in a Spark driver, in any thread. The tasks hold the slots and carry an agent of
the launcher each; everything above the agents is what ``horovod.run`` uses: its store, its report
of failures, its elastic driver.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# The rest is imported by the functions: executors import this package too, and need none of it.

_MPI = (
    "horovod.spark.run cannot use MPI (use_mpi=True): Spark starts the processes, and mpirun "
    "would have to start them itself. Leave use_mpi out; data goes through shared memory inside a "
    "host and Gloo or NCCL between hosts. For MPI, run the training with horovodrun --mpi"
)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in ``num_proc`` Spark tasks; what each returned, by rank.

    ``num_proc`` is by default what Spark runs at once (``spark.default.parallelism``). Workers
    have the environment of the executors and ``env``; nothing of the driver's goes there by
    itself. All tasks must have started within ``start_timeout`` seconds (by default
    HOROVOD_SPARK_START_TIMEOUT, or 600). Their output appears in ``stdout`` and ``stderr``, which
    are files or file-like objects (this process's own by default), with ``[rank]<stdout>:`` before
    each line. ``nics`` are network interfaces to use. ``executable`` is the workers' Python, if it
    is not that of the executors. With ``verbose=2`` more is told about the start, with 0 nothing.

    An exception of ``fn`` is raised here as itself, with the rank and the traceback there; the
    others are ended, and the Spark job is cancelled. ``use_mpi`` is refused; ``use_gloo`` and
    ``extra_mpi_args`` are accepted and change nothing.
    """
    from horovod.spark.cluster import Cluster, active_context
    from horovod.spark.job_setup import make_setup, pack_call
    from horovod.spark.static_run import run_static
    from horovod.spark.streams import StreamConsole

    call = pack_call(fn, args, kwargs)
    if use_mpi and use_gloo:
        raise ValueError("give one of use_gloo and use_mpi")
    if use_mpi:
        raise ValueError(_MPI)
    cluster = Cluster(active_context())
    num_proc = _count("num_proc", num_proc, cluster.default_parallelism)
    setup = make_setup(
        cluster,
        call,
        StreamConsole(stdout, stderr, timestamps=prefix_output_with_timestamp, quiet=verbose < 1),
        start_timeout=start_timeout,
        env=env,
        nics=nics,
        executable=executable,
        verbose=verbose,
    )
    return run_static(setup, num_proc)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in a job that goes on when executors come and go.

    The function is written for elastic training (docs/elastic.md). The job begins when
    ``num_proc`` tasks run, within ``start_timeout``; then it uses all that come, up to
    ``max_num_proc``. When tasks, executors or whole hosts are lost it goes on with the others, and
    Spark's next attempt of such a task joins it. With fewer than ``min_num_proc`` it waits, for
    ``elastic_timeout`` seconds at most (by default HOROVOD_ELASTIC_TIMEOUT, or 600). After
    ``reset_limit`` changes it ends. ``min_num_proc`` and ``max_num_proc`` are by default
    ``num_proc``. Returns what the first ``min_num_proc`` ranks returned. The other arguments are
    those of `run`; ``min_np`` and ``max_np`` are older names.
    """
    from horovod.spark.cluster import Cluster, active_context
    from horovod.spark.elastic_run import limits_from, run_elastic_tasks
    from horovod.spark.job_setup import make_setup, pack_call
    from horovod.spark.streams import StreamConsole

    call = pack_call(fn, args, kwargs)
    min_num_proc = _newer("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _newer("max_np", max_np, "max_num_proc", max_num_proc)
    cluster = Cluster(active_context())
    limits = limits_from(
        _count("num_proc", num_proc, cluster.default_parallelism),
        min_num_proc,
        max_num_proc,
        reset_limit,
        elastic_timeout,
    )
    setup = make_setup(
        cluster,
        call,
        StreamConsole(stdout, stderr, timestamps=prefix_output_with_timestamp, quiet=verbose < 1),
        start_timeout=start_timeout,
        env=env,
        nics=nics,
        executable=None,
        verbose=verbose,
    )
    return run_elastic_tasks(setup, limits)


def _newer(old: str, value: int | None, new: str, newer: int | None) -> int | None:
    if value is None:
        return newer
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)
    return newer or value


def _count(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value
