"""Spark for tests: one standalone cluster and one session on it for all of them.

Python on its executors is forked from a process that has imported what tasks and ranks need: see
`tests.forked_python`. `test_sessions` has sessions whose Python is started as Spark does it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.forked_client import AGENT_NAME
from tests.forked_python import forked_python
from tests.rank_process import PRELOAD
from tests.spark.cluster import (
    FORKED_DAEMON,
    QUICK_JAVA,
    StandaloneCluster,
    executors,
    spark_environment,
    until,
)

# Before the fork server starts: what ranks, Spark's tasks and examples import.
PRELOAD += ["horovod.runner.functions.run_task", "horovod.spark.task.relay", "horovod.spark.torch"]
PRELOAD += ["pyspark.worker", "pyspark.ml.linalg", "pandas", "pyarrow.parquet", "sklearn.datasets"]
PRELOAD += ["lightning.pytorch", "torch.utils.tensorboard", "tensorflow"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A master and two workers with two slots each, as processes of their own."""
    os.environ[AGENT_NAME] = forked_python()[0]
    cluster = StandaloneCluster(tmp_path_factory.mktemp("spark"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def spark(cluster: StandaloneCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on the cluster, with an executor on each worker. Only one can be in a process."""
    from pyspark.sql import SparkSession

    os.environ.update(spark_environment(), PYSPARK_PYTHON=forked_python()[0])
    events = tmp_path_factory.mktemp("events")
    warehouse = tmp_path_factory.mktemp("warehouse")
    builder = (
        SparkSession.builder.master(cluster.url)
        .appName("horovod-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.extraJavaOptions", QUICK_JAVA)
        .config("spark.executor.extraJavaOptions", QUICK_JAVA)
        .config(*FORKED_DAEMON.split("="))
        .config("spark.executor.cores", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.executor.memory", "1g")
        .config("spark.driver.memory", "1g")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", events.as_uri())
        .config("spark.sql.warehouse.dir", str(warehouse))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.network.timeout", "600s")
    )
    for attempts_left in reversed(range(3)):  # Java may be too slow for its own patience
        try:
            session = builder.getOrCreate()
            break
        except Exception:
            if not attempts_left:
                raise
    _wait_for_executors(session)
    yield session
    session.stop()


@pytest.fixture
def whole(spark: Any) -> Any:
    """The session, with all executors there: the master replaces those that a test has killed.

    They are idle: tasks that were cancelled may still end, and new ones would all go elsewhere.
    """
    _wait_for_executors(spark)
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    until(
        lambda: not any(info.numRunningTasks() for info in tracker.getExecutorInfos()),
        "the end of all tasks",
    )
    return spark


def _wait_for_executors(session: Any) -> None:
    from horovod.spark.cluster import Cluster

    slots = 2 * 2  # two workers, two cores each
    until(
        lambda: Cluster(session.sparkContext).slots == slots and len(executors(session)) == 1 + 2,
        f"{slots} slots",
    )
