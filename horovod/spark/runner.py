"""Run jobs whose processes are Spark tasks: ``horovod.spark.run`` and ``run_elastic``.

Users call them in a Spark driver, in any thread. Each task holds a slot and runs an agent of the
launcher; everything above the agents is what ``horovod.run`` uses: its store, its report of
failures, its elastic driver.
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
    resource_profile: Any = None,
) -> list[Any]:
    """Call a function on all ranks of a job whose processes are Spark tasks.

    An exception of the function is raised here as itself, with the rank and the traceback there;
    the other ranks are ended, and the Spark job is cancelled.

    Args:
        fn: Function to call. It and its arguments must be possible to pickle.
        args: Positional arguments for it.
        kwargs: Keyword arguments for it.
        num_proc: Number of ranks. By default the number of tasks that Spark runs at once
            (`spark.default.parallelism`).
        start_timeout: Seconds within which all tasks must have started. By default the value of
            HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi: Refused if it is true: Spark starts the processes, which mpirun would have to do.
        use_gloo: Accepted for compatibility and ignored.
        extra_mpi_args: Accepted for compatibility and ignored.
        env: Environment variables for the workers, in addition to those of the executors. Nothing
            of the driver's environment is passed on by itself.
        stdout: File or file-like object for the workers' standard output. By default this process's
            own. Each line has the rank before it.
        stderr: File or file-like object for the workers' standard error. By default this process's
            own. Each line has the rank before it.
        verbose: How much is said about the start: 0 is nothing, 2 is more. The default is 1.
        nics: Network interfaces to use between the hosts. By default they are found.
        prefix_output_with_timestamp: Whether lines also begin with the time. The default is False.
        executable: Python interpreter of the workers. By default that of the executors.
        resource_profile: `pyspark.resource.ResourceProfile` with the cores, GPUs and other
            resources of each task (Spark's stage-level scheduling). By default what the session
            says, such as `spark.task.resource.gpu.amount`.

    Returns:
        A list with what each rank returned, in the order of ranks.

    Raises:
        ValueError: An argument is wrong; nothing was started.
        TimeoutException: The tasks did not start in time; it is a
            `horovod.common.exceptions.TimeoutException`.

    Examples:
        >>> results = horovod.spark.run(train, args=(10,), num_proc=4)
    """
    from horovod.spark.cluster import Cluster, active_context
    from horovod.spark.job_setup import StreamConsole, make_setup, pack_call
    from horovod.spark.jobs import run_static

    call = pack_call(fn, args, kwargs)
    if use_mpi and use_gloo:
        raise ValueError("give one of use_gloo and use_mpi")
    if use_mpi:
        raise ValueError(_MPI)
    cluster = Cluster(active_context(), resource_profile)
    num_proc = _count(num_proc, cluster.default_parallelism)
    setup = make_setup(
        cluster,
        call,
        StreamConsole(stdout, stderr, timestamps=prefix_output_with_timestamp, quiet=verbose < 1),
        start_timeout=start_timeout,
        env=env,
        nics=nics,
        verbose=verbose,
        executable=executable,
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
    resource_profile: Any = None,
) -> list[Any]:
    """Call a function in a job that goes on when executors come and go.

    The function is written for elastic training. The job begins when `num_proc` tasks run, and then
    uses all tasks that come, up to `max_num_proc`. When tasks, executors or whole hosts are lost it
    goes on with the others, and Spark's next attempt of such a task joins it.

    Args:
        fn: Function to call. It and its arguments must be possible to pickle.
        args: Positional arguments for it.
        kwargs: Keyword arguments for it.
        num_proc: Number of ranks with which the job begins. By default the number of tasks that
            Spark runs at once (`spark.default.parallelism`).
        min_num_proc: Number of ranks below which the job waits for new ones. By default `num_proc`.
        max_num_proc: Number of ranks up to which the job grows. By default `num_proc`.
        start_timeout: Seconds within which `num_proc` tasks must have started. By default the value
            of HOROVOD_SPARK_START_TIMEOUT, or 600.
        elastic_timeout: Seconds for which the job waits while it has fewer than `min_num_proc`
            ranks. By default the value of HOROVOD_ELASTIC_TIMEOUT, or 600.
        reset_limit: Number of changes of membership after which the job ends. By default there is
            no limit.
        env: Environment variables for the workers, in addition to those of the executors. Nothing
            of the driver's environment is passed on by itself.
        stdout: File or file-like object for the workers' standard output. By default this process's
            own. Each line has the rank before it.
        stderr: File or file-like object for the workers' standard error. By default this process's
            own. Each line has the rank before it.
        verbose: How much is said about the start: 0 is nothing, 2 is more. The default is 1.
        nics: Network interfaces to use between the hosts. By default they are found.
        prefix_output_with_timestamp: Whether lines also begin with the time. The default is False.
        min_np: Deprecated name of `min_num_proc`.
        max_np: Deprecated name of `max_num_proc`.
        resource_profile: `pyspark.resource.ResourceProfile` with the cores, GPUs and other
            resources of each task (Spark's stage-level scheduling). By default what the session
            says, such as `spark.task.resource.gpu.amount`.

    Returns:
        A list with what the first `min_num_proc` ranks returned, in the order of ranks.

    Raises:
        ValueError: An argument is wrong; nothing was started.
        TimeoutException: `num_proc` tasks did not start in time.
    """
    from horovod.spark.cluster import Cluster, active_context
    from horovod.spark.job_setup import StreamConsole, make_setup, pack_call
    from horovod.spark.jobs import limits_from, run_elastic_tasks

    call = pack_call(fn, args, kwargs)
    min_num_proc = _newer("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _newer("max_np", max_np, "max_num_proc", max_num_proc)
    cluster = Cluster(active_context(), resource_profile)
    limits = limits_from(
        _count(num_proc, cluster.default_parallelism),
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
        verbose=verbose,
    )
    return run_elastic_tasks(setup, limits)


def _newer(old: str, value: int | None, new: str, newer: int | None) -> int | None:
    if value is None:
        return newer
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)
    return newer or value


def _count(num_proc: int | None, default: int) -> int:
    if num_proc is None:
        return default
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise ValueError(f"num_proc must be a whole number of at least 1, not {num_proc!r}")
    return num_proc
