"""Prepare jobs on Spark, with fixed ranks and elastic ones, from the arguments of `runner`."""

from __future__ import annotations

import dataclasses
import os
import sys
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
    Colour,
    Console,
    JobController,
    JobWatcher,
    put,
    search_path,
)
from horovod.spark.cluster import Cluster
from horovod.spark.spark_job import SparkJob
from horovod.spark.task_link import TaskServer, Ticket


class StreamConsole(Console):
    """A console that writes to objects with a ``write`` method, of text or of bytes.

    Notebooks replace ``sys.stdout`` by an object without a descriptor, so this one writes text.
    """

    def __init__(self, stdout: Any, stderr: Any, *, timestamps: bool, quiet: bool) -> None:
        super().__init__(timestamps=timestamps, speaker="horovod.spark")
        self._terminals = set()
        self._coloured = set()
        self._streams: dict[str, Any] = {
            "stdout": sys.stdout if stdout is None else stdout,
            "stderr": sys.stderr if stderr is None else stderr,
        }
        self._files = {name: id(stream) for name, stream in self._streams.items()}
        self._quiet = quiet

    def say(self, text: str, colour: Colour = Colour.PLAIN) -> None:
        if not self._quiet:
            super().say(text, colour)

    def _put(self, stream: str, data: bytes) -> None:
        target = self._streams[stream]
        if not data or stream in self._lost:
            return
        try:
            try:
                target.write(data.decode(errors="replace"))
            except TypeError:  # a file of bytes
                target.write(data)
            if hasattr(target, "flush"):
                target.flush()
        except BrokenPipeError:
            self._lost.add(stream)


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
    verbose: int,
    executable: str | None = None,
) -> JobSetup:
    """Make the setup of a job; `ValueError` for an argument that is wrong."""
    if start_timeout is None:
        start_timeout = Config.from_env().spark_start_timeout
    if start_timeout <= 0:
        raise ValueError(f"start_timeout must be more than 0 seconds, not {start_timeout!r}")
    interfaces = [nics] if isinstance(nics, str) else sorted(nics or ())
    listen, address = cluster.driver_addresses(interfaces)
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name:
            raise ValueError(f"env must map names to texts, but has {name!r}: {value!r}")
    store = MemoryStore()
    put(store, CALL, call)
    store.set(SEARCH_PATH, b"[]")  # tasks have it already, and put it behind their own
    ticket = Ticket(
        address=address,
        port=0,
        key=new_key(),
        env=dict(env or {}),
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
