"""Code that runs in Spark's tasks, and what functions that run there may ask for."""

from __future__ import annotations

import os

GPUS = "HOROVOD_SPARK_TASK_GPUS"
"""Tells a worker the addresses of the GPUs that Spark assigned to its task, with commas."""


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark has assigned to this task.

    It is for functions that `horovod.spark.run` calls, and for functions in Spark's own tasks.

    Returns:
        A list of texts, which is empty where Spark has assigned no GPU.

    Examples:
        >>> torch.cuda.set_device(int(get_available_devices()[0]))
    """
    if GPUS in os.environ:
        return [address for address in os.environ[GPUS].split(",") if address]
    from pyspark import TaskContext

    context = TaskContext.get()
    resources = {} if context is None else context.resources()
    return list(resources["gpu"].addresses) if "gpu" in resources else []


def local_device_index(local_rank: int) -> int:
    """Return the index of the GPU that Spark assigned to this task, else the local rank."""
    devices = get_available_devices()
    return int(devices[0]) if devices else local_rank
