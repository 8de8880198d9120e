"""Backends, which run the training function of an estimator on many processes."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from horovod.common.logging import TORCH_VERSION_SAID


class Backend(ABC):
    """Runs a training on many processes; subclass it to train elsewhere than on Spark."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call a function on all processes and wait for what it returns.

        Args:
            fn: Function to call.
            args: Positional arguments for it.
            kwargs: Keyword arguments for it.
            env: Environment variables for the processes.

        Returns:
            A list with what each process returned, in the order of ranks.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Return the number of processes that `run` uses."""


class SparkBackend(Backend):
    """Runs trainings on the executors of the active Spark session.

    Args:
        num_proc: Number of processes. By default the number of tasks that Spark runs at once.
        env: Environment variables of the processes. By default those of this process, without
            CUDA_VISIBLE_DEVICES, which would name the driver's GPUs.
        **kwargs: Further arguments of `horovod.spark.run`, such as `start_timeout`.

    Raises:
        ValueError: `num_proc` is less than 1.
    """

    def __init__(
        self, num_proc: int | None = None, env: dict[str, str] | None = None, **kwargs: Any
    ) -> None:
        if num_proc is not None and num_proc < 1:
            raise ValueError(f"num_proc must be at least 1, not {num_proc}")
        self._num_proc = num_proc
        self._env = env
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call a function on all processes, by `horovod.spark.run`.

        Args:
            fn: Function to call.
            args: Positional arguments for it.
            kwargs: Keyword arguments for it.
            env: Environment variables in addition to those of the constructor.

        Returns:
            A list with what each process returned, in the order of ranks.
        """
        import horovod.spark

        full = dict(os.environ if self._env is None else self._env)
        full.update(env or {})
        full.pop("CUDA_VISIBLE_DEVICES", None)
        if "horovod.engine" in sys.modules:
            # This process, which has the same torch, has warned of its version.
            full[TORCH_VERSION_SAID] = "1"
        return list(
            horovod.spark.run(
                fn,
                args=args,
                kwargs=kwargs or {},
                num_proc=self.num_processes(),
                env=full,
                **self._kwargs,
            )
        )

    def num_processes(self) -> int:
        """Return the number of processes that `run` uses."""
        if self._num_proc is None:
            from horovod.spark.cluster import Cluster, active_context

            self._num_proc = Cluster(active_context()).default_parallelism
        return self._num_proc
