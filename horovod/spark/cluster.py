"""What the Spark cluster of the active session offers: slots, executors, the driver's address.

`runner` asks before it starts a job, and again when too few tasks have started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from horovod.common.addresses import (
    LOOPBACK,
    is_local,
    is_loopback,
    resolve,
    routable_address,
)
from horovod.runner.agents.probe import interface_address
from horovod.runner.agents.store_endpoints import own_interfaces

_ANY = ("0.0.0.0", "::")


def active_context() -> Any:
    """The SparkContext of this process; `RuntimeError` where there is none."""
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


class Cluster:
    """The cluster behind a SparkContext."""

    def __init__(self, context: Any) -> None:
        self.context = context
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
    def slots(self) -> int:
        """How many tasks the executors that are here now can run at once."""
        scala = self.context._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return int(scala.maxNumConcurrentTasks(profile))

    @property
    def allows_barrier(self) -> bool:
        """Spark refuses barrier stages while executors come and go by themselves."""
        return not self._flag("spark.dynamicAllocation.enabled")

    def describe_offer(self) -> str:
        """``2 slots in 2 executors (worker-1, worker-2)``, for people."""
        slots = self.slots
        text = f"{slots} slot{'' if slots == 1 else 's'}"
        if self.is_fixed:
            return f"{text} ({self.master})"
        names = self._executors()
        where = f" ({', '.join(names)})" if names else ""
        executors = f"{len(names)} executor{'' if len(names) == 1 else 's'}"
        cpus = self._conf.get("spark.task.cpus", "1")
        each = f", {cpus} cores for each task (spark.task.cpus)" if cpus != "1" else ""
        gpus = self._conf.get("spark.task.resource.gpu.amount", "")
        each += f", {gpus} GPUs for each task (spark.task.resource.gpu.amount)" if gpus else ""
        return f"{text} in {executors}{where}{each}"

    def _executors(self) -> list[str]:
        infos = self.context._jsc.sc().statusTracker().getExecutorInfos()
        found = [f"{info.host()}:{info.port()}" for info in infos]
        driver = f"{self._conf.get('spark.driver.host', '')}:"
        rest = [each for each in found if not each.startswith(driver)]
        if len(rest) == len(found) - 1:
            return rest  # executors on other machines
        driver_port = self._driver_block_port()
        return [each for each in found if not each.endswith(f":{driver_port}")]

    def _driver_block_port(self) -> int:
        return int(
            self.context._jvm.org.apache.spark.SparkEnv.get().blockManager().blockManagerId().port()
        )

    def _flag(self, name: str) -> bool:
        return str(self._conf.get(name, "false")).lower() == "true"

    def driver_addresses(self, nics: Sequence[str] = ()) -> tuple[str, str]:
        """Where to listen for tasks, and under which address executors reach that."""
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
        if bind in _ANY or (bind and is_local(bind)):
            return bind, name  # executors reach it by another address, as they reach Spark's driver
        raise RuntimeError(
            f"cannot tell at which address executors reach this machine: spark.driver.host is "
            f"{name or 'not set'}, which is none of its own; set it, or give nics=[INTERFACE]"
        )
