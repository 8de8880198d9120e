"""The body of a Spark task: an agent of the launcher at the end of a connection to the driver.

Spark calls `serve` in every task. It connects to the driver, says where it runs, starts the agent
that the driver sends, and passes bytes between the two until the driver ends the task. The agent
(see `horovod.runner.agents.agent`) starts the worker and ends everything that is left of it when
this process goes away: by a cancelled job, a killed executor, or a driver that is gone.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark import TaskContext

import horovod
from horovod.common.host import host_hash
from horovod.common.wire import encode_key
from horovod.runner.api import KEY, Relay, connect, search_path
from horovod.spark.task import GPUS, get_available_devices
from horovod.spark.task_link import Ticket, installed_torch

_SPARKS_OWN = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT")
_RESTART = (
    "the worker in this task failed or is not needed; the task ends with an error so that Spark "
    "starts it again"
)
_TORCH_VERSION = """\
import importlib.metadata as m
try:
    print(m.version("torch"))
except m.PackageNotFoundError:
    pass
"""


def serve(ticket: Ticket, _rows: Iterable[Any]) -> Iterator[Any]:
    """Serve the job as a host until the driver ends that; yield nothing."""
    context = TaskContext.get()
    assert context is not None
    last_chance = context.attemptNumber() + 1 >= ticket.max_failures
    for attempt in itertools.count():
        if not _serve_once(ticket, context, attempt):
            break
        if not last_chance:
            raise RuntimeError(_RESTART)  # Spark may find a better executor for the next attempt
    yield from ()


def _serve_once(ticket: Ticket, context: TaskContext, attempt: int) -> bool:
    """Serve as a host until the driver ends that; return whether to begin anew as another host."""
    try:
        channel = connect(ticket.address, ticket.port, ticket.key, ticket.start_timeout)
    except OSError as error:
        raise ConnectionError(
            f"the Spark task on {os.uname().nodename} cannot reach the driver at "
            f"{ticket.address}:{ticket.port} ({error}). Executors must be able to connect to ports "
            f"of the driver: see spark.driver.host, and the nics argument of horovod.spark.run"
        ) from None
    try:
        channel.send(describe(ticket, context, attempt))
        return Relay(channel, worker_environment(ticket)).run() == "again"
    finally:
        channel.close()


def describe(ticket: Ticket, context: TaskContext, attempt: int) -> dict[str, Any]:
    """Describe this task for the driver."""
    return {
        "partition": context.partitionId(),
        "attempt": [context.taskAttemptId(), attempt],
        # From the environment, or one name for each host or container of YARN.
        "host": os.environ.get("HOROVOD_HOSTNAME") or host_hash(os.environ.get("CONTAINER_ID")),
        "hostname": os.uname().nodename,
        "pid": os.getpid(),
        "python": ticket.executable or sys.executable,
        "versions": _versions(ticket.executable),
    }


def _versions(executable: str | None) -> dict[str, str | None]:
    """Return the versions that the workers' Python has installed, without importing them."""
    if executable is None:
        torch = installed_torch() if importlib.util.find_spec("torch") else None
        return {"horovod": horovod.__version__, "torch": torch}
    try:
        command = [executable, "-c", _TORCH_VERSION]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, env=env, timeout=60
        )
        return {"horovod": horovod.__version__, "torch": found.stdout.strip() or None}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"problem": f"the workers' Python {executable!r} does not run: {error}"}


def worker_environment(ticket: Ticket) -> dict[str, str]:
    """Return the workers' environment: the executor's, with what the user asked for."""
    env = {name: value for name, value in os.environ.items() if name not in _SPARKS_OWN}
    folders = dict.fromkeys([*search_path(), *ticket.search_path])
    env["PYTHONPATH"] = os.pathsep.join(folders)
    env[GPUS] = ",".join(get_available_devices())
    env.setdefault("HOROVOD_START_TIMEOUT", f"{ticket.start_timeout:g}")
    if "PYTHONPATH" in ticket.env:
        env["PYTHONPATH"] = os.pathsep.join([ticket.env["PYTHONPATH"], env["PYTHONPATH"]])
    rest = {name: value for name, value in ticket.env.items() if name != "PYTHONPATH"}
    return {**env, **rest, KEY: encode_key(ticket.key)}
