"""``horovod.spark.run`` and ``run_elastic``: a Spark task for every process of a job.

Users call them in a Spark driver, in any thread. The tasks hold the slots and carry an agent of
the launcher each; everything above the agents is what ``horovod.run`` uses: its store, its report
of failures, its elastic driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

import horovod
from horovod.common.config import Config
from horovod.common.store import MemoryStore
from horovod.common.wire import new_key
from horovod.runner.function_call import CALL, SEARCH_PATH, put, search_path
from horovod.spark.cluster import Cluster, active_context
from horovod.spark.static_run import StaticRun
from horovod.spark.streams import StreamConsole
from horovod.spark.ticket import Ticket

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
    call = _pack(fn, args, kwargs)
    _check_backend(use_mpi, use_gloo)
    cluster = Cluster(active_context())
    num_proc = _count("num_proc", num_proc, cluster.default_parallelism)
    setup = _Setup(cluster, call, start_timeout, env, nics, executable)
    console = _console(stdout, stderr, verbose, prefix_output_with_timestamp)
    return StaticRun(
        cluster, setup.ticket, setup.bind, setup.store, console, verbose > 1, setup.nics
    ).run(num_proc)


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
    raise NotImplementedError


def _pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    if not callable(fn):
        raise ValueError(f"horovod.spark.run needs a function to call, not {fn!r}")
    try:
        packed: bytes = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise ValueError(
            f"horovod.spark.run cannot send the function or its arguments to the workers: {error}"
        ) from error
    return packed


def _check_backend(use_mpi: bool | None, use_gloo: bool | None) -> None:
    if use_mpi and use_gloo:
        raise ValueError("give one of use_gloo and use_mpi")
    if use_mpi:
        raise ValueError(_MPI)


def _count(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _console(stdout: Any, stderr: Any, verbose: int, timestamps: bool) -> StreamConsole:
    return StreamConsole(
        stdout, stderr, timestamps=timestamps, speaker="horovod.spark", quiet=verbose < 1
    )


class _Setup:
    """What both kinds of job begin with."""

    def __init__(
        self,
        cluster: Cluster,
        call: bytes,
        start_timeout: float | None,
        env: Mapping[str, str] | None,
        nics: Sequence[str] | str | None,
        executable: str | None,
    ) -> None:
        if start_timeout is None:
            start_timeout = Config.from_env().spark_start_timeout
        if start_timeout <= 0:
            raise ValueError(f"start_timeout must be more than 0 seconds, not {start_timeout!r}")
        self.nics = [nics] if isinstance(nics, str) else sorted(nics or ())
        self.bind, address = cluster.driver_addresses(self.nics)
        self.store = MemoryStore()
        put(self.store, CALL, call)
        self.store.set(SEARCH_PATH, b"[]")  # tasks know it already, and put it behind their own
        self.ticket = Ticket(
            address=address,
            port=0,
            key=new_key(),
            env=_checked_environment(env),
            search_path=search_path(),
            executable=executable,
            version=horovod.__version__,
            start_timeout=start_timeout,
        )


def _checked_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    found = dict(env or {})
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"env must map names to texts, but has {name!r}: {value!r}")
    if os.fspath("") in found:
        raise ValueError("env has an empty name")
    return found
