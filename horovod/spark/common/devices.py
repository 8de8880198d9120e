"""Which GPU a rank on an executor uses."""

from __future__ import annotations


def local_device_index(local_rank: int) -> int:
    """The GPU that Spark assigned to this task, or that of the local rank."""
    from horovod.spark.task import get_available_devices

    devices = get_available_devices()
    return int(devices[0]) if devices else local_rank
