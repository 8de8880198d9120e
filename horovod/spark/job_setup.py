"""Prepare jobs on Spark, with fixed ranks and elastic ones, from the arguments of `runner`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle

import horovod
from horovod.common.config import Config
from horovod.common.store import MemoryStore
from horovod.common.wire import new_key
from horovod.observe.dashboard.watching import open_watcher
from horovod.runner.api import (
    CALL,
    SEARCH_PATH,
    Console,
    JobController,
    JobWatcher,
    put,
    search_path,
)
from horovod.spark.cluster import Cluster
from horovod.spark.spark_job import SparkJob
from horovod.spark.task_link import TaskServer
from horovod.spark.ticket import Ticket


@dataclass(frozen=True)
class JobSetup:
    """A job that is ready to be started."""

    cluster: Cluster
    store: MemoryStore  # contains the call
    listen: str  # the driver's address for tasks
    ticket: Ticket
    console: Console
    verbose: bool
    nics: Sequence[str]

    @property
    def command(self) -> list[str]:
        """The command of a worker; without an `executable`, its executor's Python runs it."""
        return [self.ticket.executable or "", "-m", "horovod.runner.functions.run_task"]

    def open_watcher(self, elastic: bool = False) -> JobWatcher:
        """Open the watcher of the job, such as its live page, as the driver's environment says."""
        return open_watcher(
            Config.from_env(),
            os.environ,
            self.store,
            title="horovod.spark.run",
            say=self.console.say,
            elastic=elastic,
        )

    def open_job(self, watcher: JobWatcher) -> JobController:
        """Return the controller of the job, whose store contains the call."""
        return JobController(self.console, store=self.store, key=self.ticket.key, watcher=watcher)

    @contextmanager
    def open_tasks(self, count: int, *, barrier: bool) -> Iterator[tuple[TaskServer, SparkJob]]:
        """Ask Spark for tasks, and yield the server to which they connect, and their Spark job.

        At the end of the block the tasks end; if it fails, they are cancelled.
        """
        server = TaskServer(self.listen, self.ticket.key)
        try:
            ticket = dataclasses.replace(self.ticket, port=server.port)
            job = SparkJob(self.cluster, ticket, count, barrier=barrier, ended=server.wake)
            try:
                yield server, job
            except BaseException:
                job.cancel()
                raise
        finally:
            server.close()
        job.wait()  # the tasks end because the server has let them go


def make_setup(
    cluster: Cluster,
    call: bytes,
    console: Console,
    *,
    start_timeout: float | None,
    env: Mapping[str, str] | None,
    nics: Sequence[str] | str | None,
    executable: str | None,
    verbose: int,
) -> JobSetup:
    """Make the setup of a job; `ValueError` for an argument that is wrong."""
    if start_timeout is None:
        start_timeout = Config.from_env().spark_start_timeout
    if start_timeout <= 0:
        raise ValueError(f"start_timeout must be more than 0 seconds, not {start_timeout!r}")
    interfaces = [nics] if isinstance(nics, str) else sorted(nics or ())
    listen, address = cluster.driver_addresses(interfaces)
    store = MemoryStore()
    put(store, CALL, call)
    store.set(SEARCH_PATH, b"[]")  # tasks have it already, and put it behind their own
    ticket = Ticket(
        address=address,
        port=0,
        key=new_key(),
        env=_checked_environment(env),
        search_path=search_path(),
        executable=executable,
        version=horovod.__version__,
        start_timeout=start_timeout,
        max_failures=cluster.max_task_failures,
    )
    return JobSetup(cluster, store, listen, ticket, console, verbose > 1, interfaces)


def pack_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """Pickle the function and its arguments for the workers; `ValueError` if that fails."""
    if not callable(fn):
        raise ValueError(f"horovod.spark.run needs a function to call, not {fn!r}")
    try:
        packed: bytes = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise ValueError(
            f"horovod.spark.run cannot send the function or its arguments to the workers: {error}"
        ) from error
    return packed


def _checked_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    found = dict(env or {})
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name:
            raise ValueError(f"env must map names to texts, but has {name!r}: {value!r}")
    return found
