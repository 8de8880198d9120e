"""A Spark program of one process, for tests that end it by force: see `test_sessions`.

Takes a folder for what its ranks write. Says in lines of JSON how far it has come.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import horovod.spark
from horovod.common.exceptions import TimeoutException
from tests.spark import functions
from tests.spark.cluster import QUICK_JAVA


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main(folder: Path) -> None:
    # Executors that come and go forbid barrier tasks, so these jobs use ordinary ones.
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.dynamicAllocation.enabled", "true")
    builder = builder.config("spark.driver.extraJavaOptions", QUICK_JAVA)
    builder.getOrCreate()
    say(ranks=horovod.spark.run(functions.rank, num_proc=2))
    try:
        horovod.spark.run(functions.rank, num_proc=3)
    except TimeoutException as error:
        say(too_many=str(error))
    results = horovod.spark.run_elastic(
        functions.train, (str(folder / "elastic"),), num_proc=2, min_num_proc=1
    )
    say(elastic=len(results))
    try:
        horovod.spark.run(functions.hang, (str(folder / "first"),), num_proc=2)
    except KeyboardInterrupt:
        say(interrupted=True)
    horovod.spark.run(functions.hang, (str(folder / "second"),), num_proc=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
