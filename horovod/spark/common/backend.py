"""What runs the training function of an estimator on many processes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Backend(ABC):
    """Runs a function on all processes of a job; subclass it to train elsewhere than on Spark."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """What `fn(*args, **kwargs)` returned on each process, in the order of ranks."""

    @abstractmethod
    def num_processes(self) -> int:
        """How many processes `run` uses."""


class SparkBackend(Backend):
    """Runs on the executors of the active Spark session, by `horovod.spark.run`.

    Processes get `env`, or this process's environment without CUDA_VISIBLE_DEVICES, which would
    name the driver's GPUs. Further arguments go to `horovod.spark.run`.
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
        import horovod.spark

        full = dict(os.environ if self._env is None else self._env)
        full.update(env or {})
        full.pop("CUDA_VISIBLE_DEVICES", None)
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
        if self._num_proc is None:
            from pyspark import SparkContext

            context = SparkContext._active_spark_context
            if context is None:
                raise RuntimeError(
                    "there is no active Spark session: make one with "
                    "SparkSession.builder.getOrCreate(), or give num_proc"
                )
            self._num_proc = context.defaultParallelism
        return int(self._num_proc)
