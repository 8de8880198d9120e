"""Ask Spark what the cluster of the active session has: slots, executors, the driver's address.

`runner` asks before it starts a job, and again when too few tasks have started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from horovod.common.joining.addresses import (
    LOOPBACK,
    is_local,
    is_loopback,
    resolve,
    routable_address,
)
from horovod.common.logging import get_logger
from horovod.runner.api import interface_address, own_interfaces

Answer = TypeVar("Answer")

logger = get_logger(__name__)


def active_context() -> Any:
    """Return the SparkContext of this process; `RuntimeError` if there is none."""
    try:
        from pyspark import SparkContext
        from pyspark.sql.utils import is_remote
    except ImportError as error:
        raise ImportError(
            f"horovod.spark needs PySpark ({error}); install it with: pip install 'horovod[spark]'"
        ) from error
    if is_remote():
        raise RuntimeError(
            "horovod.spark.run cannot use a Spark Connect session: it starts tasks through a "
            "SparkContext, which the client of a Spark Connect server does not have. Run the "
            "program where there is one: with spark-submit on the cluster, or with "
            "SparkSession.builder.master('spark://HOST:PORT') instead of .remote(...)"
        )
    context = SparkContext._active_spark_context
    if context is None or context._jsc is None:
        raise RuntimeError(
            "horovod.spark.run needs an active SparkContext, and this process has none: create a "
            "session first, with SparkSession.builder.getOrCreate()"
        )
    return context


def _ask_java(question: Callable[[], Answer]) -> Answer | None:
    """Ask Spark's Java side; return None if it fails, since a job can do without the answer."""
    try:
        return question()
    except Exception as error:
        logger.debug("Spark does not answer: %s", error)
        return None


class Cluster:
    """The cluster behind a SparkContext, and what each task of a job asks of it."""

    def __init__(self, context: Any, resource_profile: Any = None) -> None:
        """Take a `pyspark.resource.ResourceProfile`, or None for Spark's own."""
        from pyspark.resource import ResourceProfile

        if resource_profile is not None and not isinstance(resource_profile, ResourceProfile):
            raise ValueError(
                "resource_profile must be a pyspark.resource.ResourceProfile, such as "
                f"ResourceProfileBuilder().require(requests).build, not {resource_profile!r}"
            )
        self.context = context
        self.resource_profile = resource_profile
        self._conf = context.getConf()

    @property
    def default_parallelism(self) -> int:
        return int(self.context.defaultParallelism)

    @property
    def master(self) -> str:
        return str(self.context.master)

    @property
    def is_fixed(self) -> bool:
        """Whether no slots can come later: all tasks run in the driver's process."""
        return re.fullmatch(r"local(\[[^\]]*\])?", self.master) is not None

    @property
    def max_task_failures(self) -> int:
        """How often a task may fail before Spark ends the job."""
        local = re.fullmatch(r"local(\[[^,\]]*(,(?P<most>\d+))?\])?", self.master)
        if local:
            return int(local["most"] or 1)
        return int(self._conf.get("spark.task.maxFailures", "4"))

    @property
    def slots(self) -> int | None:
        """How many tasks the present executors can run at once; None if Spark does not tell.

        PySpark has no public function for it, so this asks Spark's Java side, where it fails in
        installations that lack some classes.
        """

        def ask() -> int:
            scala = self.context._jsc.sc()
            if self.resource_profile is None:
                profile = scala.resourceProfileManager().defaultResourceProfile()
            else:
                profile = self.resource_profile._java_resource_profile
            return int(scala.maxNumConcurrentTasks(profile))

        return _ask_java(ask)

    @property
    def allows_barrier(self) -> bool:
        """Whether barrier stages can run, which Spark refuses while executors come and go."""
        return str(self._conf.get("spark.dynamicAllocation.enabled", "false")).lower() != "true"

    def describe_offer(self) -> str:
        """Describe the cluster, such as ``2 slots in 2 executors (worker-1, worker-2)``."""
        slots = self.slots
        if slots is None:
            text = "an unknown number of slots"
        else:
            text = f"{slots} slot{'' if slots == 1 else 's'}"
        if self.is_fixed:
            return f"{text} ({self.master})"
        hosts = self.executor_hosts()
        if hosts is not None:
            where = f" ({', '.join(hosts)})" if hosts else ""
            text += f" in {len(hosts)} executor{'' if len(hosts) == 1 else 's'}{where}"
        if self.resource_profile is not None:
            requests = self.resource_profile.taskResources.values()
            asked = ", ".join(f"{request.amount:g} {request.resourceName}" for request in requests)
            return f"{text}, {asked} for each task (resource_profile)"
        cpus = self._conf.get("spark.task.cpus", "1")
        each = f", {cpus} cores for each task (spark.task.cpus)" if cpus != "1" else ""
        gpus = self._conf.get("spark.task.resource.gpu.amount", "")
        each += f", {gpus} GPUs for each task (spark.task.resource.gpu.amount)" if gpus else ""
        return f"{text}{each}"

    def executor_hosts(self) -> list[str] | None:
        """Return the hosts of the present executors; None if Spark does not tell."""

        def ask() -> list[str]:
            infos = self.context._jsc.sc().statusTracker().getExecutorInfos()
            return sorted(str(info.host()) for info in infos)

        hosts = _ask_java(ask)
        driver = self._conf.get("spark.driver.host", "")
        if hosts and driver in hosts:
            hosts.remove(driver)  # Spark counts the driver among them
        return hosts

    def driver_addresses(self, nics: Sequence[str] = ()) -> tuple[str, str]:
        """Return the address to listen at for tasks, and the one at which executors reach it."""
        if nics:
            for nic in nics:
                address = interface_address(nic)
                if address:
                    return address, address
            raise ValueError(
                f"nics={list(nics)!r}: the driver's machine has no such interface with an address; "
                f"it has {', '.join(own_interfaces())}"
            )
        if self.is_fixed:
            return LOOPBACK, LOOPBACK
        name = self._conf.get("spark.driver.host", "")
        own = [address for address in resolve(name) if is_local(address)] if name else []
        routable = [address for address in own if not is_loopback(address)]
        if own and not routable and name != "localhost" and not is_loopback(name):
            routable = [routable_address(None)]  # the name means loopback only on this machine
        for address in routable or own:
            return address, address
        bind = self._conf.get("spark.driver.bindAddress", "")
        if bind in ("0.0.0.0", "::") or (bind and is_local(bind)):
            return bind, name  # executors reach it by another address, as they reach Spark's driver
        raise RuntimeError(
            f"cannot tell at which address executors reach this machine: spark.driver.host is "
            f"{name or 'not set'}, which is none of its own; set it, or give nics=[INTERFACE]"
        )
