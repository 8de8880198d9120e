"""The Ray actor that is one rank of a job.

`strategy` (static jobs), `node_set` (elastic jobs), and programs that want a rank of their own
(``ray.remote(BaseHorovodWorker)``) make it. It imports neither torch nor any other framework; the
function that it is given does.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

import horovod
from horovod.common.generations.membership import retire
from horovod.common.joining.launcher_store import SECRET_KEY, STORE_ADDRESS, STORE_PORT
from horovod.ray import ray_logger
from horovod.runner.api import (
    Failure,
    describe_problem,
    keep_port,
    memory_variables,
    pickled,
    probe,
)


@dataclass(frozen=True)
class WorkerInfo:
    """Facts about a worker that the driver needs, from the worker itself."""

    node_id: str
    hostname: str
    address: str
    pid: int
    gpu_ids: tuple[str, ...]
    free_port: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class WorkerEnd:
    """The end of an elastic worker's function."""

    code: int  # the exit code that a process would have
    finished: bool = False  # whether the function returned; if not, it failed or had to leave
    rank: int | None = None
    value: Any = None
    failure: Failure | None = None


class BaseHorovodWorker:
    """One rank, for programs that make the actors of a job themselves.

    `ray.remote(BaseHorovodWorker)` makes a class of actors of it. Most programs use `RayExecutor`,
    which does.

    Args:
        world_rank: Rank of this worker. The default is 0.
        world_size: Number of ranks. The default is 1.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        os.environ["HOROVOD_RANK"] = str(world_rank)
        os.environ["HOROVOD_SIZE"] = str(world_size)

    def node_id(self) -> str:
        """Return the id of the Ray node that this worker is on."""
        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        """Return the host name of this worker."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """Return the ids of the GPUs that Ray has given to this worker."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def update_env_vars(self, env_vars: Mapping[str, str]) -> None:
        """Set variables of this worker's environment.

        Args:
            env_vars: Values by name. A variable whose value is None stays as it is.
        """
        os.environ.update({k: str(v) for k, v in env_vars.items() if v is not None})

    def env_vars(self) -> dict[str, str]:
        """Return this worker's environment without the key of the job."""
        return {name: value for name, value in os.environ.items() if name != SECRET_KEY}

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that `execute` passes to its functions.

        Args:
            executable_cls: Class of the object. None makes none.
            executable_args: Positional arguments of the class.
            executable_kwargs: Keyword arguments of the class.
        """
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with this worker's object.

        If the function raises, the engine stops on this rank, so that no other rank waits for it.

        Args:
            func: Function of one argument, the worker's object.

        Returns:
            What the function returned.
        """
        try:
            return func(self.executable)
        except BaseException as error:
            stop_engine()
            where = f"raised on {_who()}"
            if not isinstance(error, Exception):  # such as SystemExit, which would end the actor
                kind = type(error).__qualname__
                raise RuntimeError(f"the function raised {kind}({error}); {where}") from error
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(where)
            raise

    def set_queue(self, queue: Any) -> None:
        """Choose where `ray_logger.log` puts what is logged here.

        Args:
            queue: Object with a method `put`.
        """
        ray_logger.configure(queue)

    # -- for the adapters ------------------------------------------------------------------

    def describe(self) -> WorkerInfo:
        """Return what the other parts of a job need to know of this worker."""
        return describe_worker()

    def join(self, env_vars: Mapping[str, str], request: Mapping[str, Any]) -> str:
        """Join the job. Adapters call it.

        Args:
            env_vars: Environment variables of this rank.
            request: Addresses and key of the job's store, as `horovod.runner.agents.probe` takes
                them.

        Returns:
            A sentence that says why it was not possible, or an empty text.
        """
        return join(env_vars, request)


class ElasticWorker(BaseHorovodWorker):
    """A worker of an elastic job: the driver decides about its rank."""

    def __init__(self) -> None:
        """Leave the environment as it is: the worker has no rank yet."""

    def share_gpus(self, index: int, count: int) -> None:
        """Make all GPUs of the node visible, with our own at the index that is our local rank."""
        mine = self.get_gpu_ids()
        others = [str(gpu) for gpu in range(count) if str(gpu) not in mine]
        before = others[: index * len(mine)]
        visible = [*before, *mine, *others[len(before) :]]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)

    def work(
        self, func: Callable[[Any], Any], executable: tuple[Any, Any, Any] = (None, None, None)
    ) -> WorkerEnd:
        """Call the function of an elastic job, and return how it ended instead of raising."""
        end = self._work(func, executable)
        stop_engine()
        retire()
        return end

    def _work(self, func: Callable[[Any], Any], executable: tuple[Any, Any, Any]) -> WorkerEnd:
        try:
            self.start_executable(*executable)
            value = func(self.executable)
        except SystemExit as error:
            if error.code in (0, None):
                return WorkerEnd(0)  # it left, or the job has no rank for it any more
            return _failed(f"the function called sys.exit({error.code!r})", error)
        except BaseException as error:
            return _failed(f"the function raised {type(error).__qualname__}: {error}", error)
        return WorkerEnd(0, True, _rank(), value)


def describe_worker() -> WorkerInfo:
    """Describe this process, which Ray has started."""
    address = ray.util.get_node_ip_address()
    return WorkerInfo(
        node_id=str(ray.get_runtime_context().get_node_id()),
        hostname=socket.gethostname(),
        address=address,
        pid=os.getpid(),
        gpu_ids=tuple(map(str, ray.get_gpu_ids())),
        free_port=keep_port(address),
        versions=own_versions(),
    )


def own_versions() -> dict[str, str]:
    """Return the versions that must be the same everywhere, of packages that are installed."""
    found = {"horovod": horovod.__version__, "Python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def join(env_vars: Mapping[str, str], request: Mapping[str, Any]) -> str:
    """Write the variables and the way to the job's store into the environment."""
    os.environ.update(env_vars)
    os.environ.update(memory_variables(os.uname().machine, os.environ))
    answer = probe(dict(request))
    problem = describe_problem(answer, request["nics"], "nics of the settings")
    if problem:
        return problem
    os.environ[STORE_ADDRESS], os.environ[STORE_PORT] = (
        answer["endpoint"][0],
        str(answer["endpoint"][1]),
    )
    if answer["nics"]:
        os.environ["HOROVOD_GLOO_IFACE"] = next(iter(answer["nics"]))
        os.environ["NCCL_SOCKET_IFNAME"] = ",".join(answer["nics"])
    return ""


def stop_engine() -> None:
    """Shut the engine down, if this process has ever loaded it."""
    module = sys.modules.get("horovod.engine.basics")
    if module is not None:
        module.HorovodBasics().shutdown()


def _rank() -> int | None:
    text = os.environ.get("HOROVOD_RANK", "")
    return int(text) if text.isdecimal() else None


def _who() -> str:
    rank = _rank()
    who = "a worker without a rank" if rank is None else f"rank {rank}"
    return f"{who} on {socket.gethostname()} (pid {os.getpid()})"


def _failed(problem: str, error: BaseException) -> WorkerEnd:
    text = "".join(traceback.format_exception(error))
    failure = Failure(_rank(), socket.gethostname(), os.getpid(), problem, text, pickled(error))
    return WorkerEnd(1, failure=failure)
