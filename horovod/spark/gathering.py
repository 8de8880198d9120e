"""Wait for the tasks of a job, check what they have installed, and give them ranks.

`runner` calls `gather` after it has asked Spark for tasks. The other functions are pure: from what
the tasks said about themselves they make errors and ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from horovod.common.exceptions import TimeoutException
from horovod.common.topology import Slot
from horovod.runner.api import Host, plan_slots
from horovod.spark.cluster import Cluster
from horovod.spark.spark_job import SparkJob
from horovod.spark.task_link import TaskInfo, TaskLink, TaskServer, installed_torch

_LOOK_SECONDS = 1.0  # between looks at whether tasks that have connected still live


def check_slots(cluster: Cluster, count: int) -> None:
    """Raise `TimeoutException` at once if the cluster can never run `count` tasks together."""
    slots = cluster.slots
    if cluster.is_fixed and slots is not None and slots < count:
        raise TimeoutException(
            f"horovod.spark.run needs {count} Spark tasks at once, and the cluster offers "
            f"{cluster.describe_offer()}, which does not change: start the session with "
            f"master('local[{count}]'), or ask for fewer processes (num_proc)"
        )


def gather(
    server: TaskServer, job: SparkJob, cluster: Cluster, count: int, timeout: float
) -> list[TaskLink]:
    """Wait until all tasks have connected; return their links in the order of partitions."""
    deadline = time.monotonic() + timeout
    while True:
        found = server.newest()
        if len(found) >= count:
            return [found[partition] for partition in sorted(found)]
        if not job.is_running:
            raise spark_error(job)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutException(too_few(cluster, count, len(found), timeout))
        server.wait(min(left, _LOOK_SECONDS))


def too_few(cluster: Cluster, count: int, found: int, timeout: float) -> str:
    """Return a message about the missing tasks that says what to do."""
    return (
        f"timed out waiting for Spark tasks to start: {count} are needed at once, and {found} "
        f"{'has' if found == 1 else 'have'} started within {timeout:g} s (start_timeout). The "
        f"cluster offers {cluster.describe_offer()}. Ask for fewer processes (num_proc), give the "
        f"application more executors or cores (spark.executor.instances, spark.executor.cores, "
        f"spark.cores.max), wait until other jobs have ended, or give a larger start_timeout"
    )


def spark_error(job: SparkJob) -> RuntimeError:
    """Make the error that says why Spark ended a job too early."""
    why = job.why() or "Spark ended the job without a word"
    hint = ""
    missing = re.search(r"No module named '([\w.]+)'", why)
    if missing:
        hint = (
            f" The executors' Python has no module {missing[1]!r}: install Horovod and what it "
            f"needs there, say which Python has it (PYSPARK_PYTHON), or send an environment along "
            f"(spark-submit --archives)."
        )
    elif "PYTHON_VERSION_MISMATCH" in why or "different version in worker" in why:
        hint = (
            " Driver and executors run different versions of Python: set PYSPARK_PYTHON and "
            "PYSPARK_DRIVER_PYTHON."
        )
    return RuntimeError(f"Spark ended the tasks of horovod.spark.run.{hint} It says:\n{why}")


def check_versions(infos: Sequence[TaskInfo], driver: str) -> None:
    """Raise `RuntimeError` if an executor lacks a package or has another version of it."""
    own_torch = installed_torch()
    reference = own_torch, "the driver"
    for info in infos:
        problem = info.versions.get("problem")
        if problem:
            raise RuntimeError(f"the executor on {info.hostname}: {problem}")
        horovod = info.versions["horovod"]
        if horovod != driver:
            raise RuntimeError(
                f"the executor on {info.hostname} has Horovod {horovod} and the driver {driver}: "
                f"install the same version everywhere"
            )
        torch = info.versions["torch"]
        if torch is None:
            raise RuntimeError(
                f"the executor on {info.hostname} has no torch for {info.python}, which Horovod "
                f"needs: install torch{'==' + own_torch if own_torch else ''} there"
            )
        if reference[0] is None:
            reference = torch, f"the executor on {info.hostname}"
        elif _release(torch) != _release(reference[0]):
            raise RuntimeError(
                f"the executor on {info.hostname} has torch {torch} for {info.python}, but "
                f"{reference[1]} has torch {reference[0]}: install the same version everywhere"
            )


def _release(version: str) -> str:
    """Return a version without its build: CPU and GPU builds of one release work together."""
    return version.partition("+")[0]


def assign_ranks(links: Sequence[TaskLink]) -> list[tuple[TaskLink, Slot]]:
    """Give tasks ranks host by host, beginning with the host of the first partition."""
    by_host: dict[str, list[TaskLink]] = {}
    for link in sorted(links, key=lambda each: each.info.partition):
        by_host.setdefault(link.info.host, []).append(link)
    ordered = [link for group in by_host.values() for link in group]
    hosts = [Host(name, len(group)) for name, group in by_host.items()]
    return list(zip(ordered, plan_slots(hosts, len(ordered)), strict=True))
