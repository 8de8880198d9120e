"""Writes an archive of what Spark's Java loads, with which all its programs start in half the time.

    python -m tests.spark.java_archive FILE

`make test-spark` does so once for an environment; `cluster.QUICK_JAVA` uses the archive if it is
there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(sys.prefix, "spark.jsa")
"""Where tests look for it. It belongs to one version of Java and of Spark."""


def write(archive: Path) -> None:
    """Start a session, do what tests do in theirs, and archive what that has loaded."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    unfinished = archive.with_suffix(".unfinished")
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"  # as `cluster.QUICK_JAVA`
    options += f" -XX:ArchiveClassesAtExit={unfinished}"
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.extraJavaOptions", options).getOrCreate()
    numbers = session.sparkContext.parallelize(range(4), 2)
    assert numbers.barrier().mapPartitions(list).count() == 4
    with tempfile.TemporaryDirectory() as folder:
        frame = session.createDataFrame([(1, 2.0), (2, 3.0)], ["a", "b"])
        frame.repartition(2).write.parquet(f"{folder}/frame")
        assert session.read.parquet(f"{folder}/frame").groupBy("a").count().count() == 2
    session.stop()
    java = SparkContext._gateway
    assert java is not None
    java.shutdown()
    java.proc.stdin.close()
    assert java.proc.wait() == 0
    unfinished.replace(archive)


if __name__ == "__main__":
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    write(Path(sys.argv[1]).absolute())
