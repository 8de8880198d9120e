"""Compute workers of the TF data service in Spark tasks.

Run it with spark-submit and the path of this file, or with ``python -m`` where Spark's defaults
name the cluster. Other than in `horovod.tensorflow.data.compute_worker`, the driver runs the
compute service, and every slot of the cluster runs a worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from horovod.common.config import Config
from horovod.common.wire import new_key
from horovod.runner.api import ComputeService
from horovod.spark.cluster import Cluster
from horovod.spark.runner import run

_DESCRIPTION = """\
Run workers of TensorFlow's data service in Spark tasks: processes that read, decode and augment
data, so that training processes only train. There is one for each slot of the application:

  spark-submit --master spark://HOST:7077 \\
      $(python -c 'import horovod.spark.tensorflow.compute_worker as m; print(m.__file__)') \\
      /shared/data_service.json

Training processes read the file, as with `python -m horovod.tensorflow.data.compute_worker`; the
one that calls config.compute_client().shutdown() ends the workers.
"""


def main(dispatchers: int, dispatcher_side: str, configfile: str) -> None:
    """Run compute workers on all slots of the cluster, until the training ends the service."""
    from pyspark.sql import SparkSession

    from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
    from horovod.tensorflow.data.compute_worker import remove_configuration

    cluster = Cluster(SparkSession.builder.getOrCreate().sparkContext)
    workers = cluster.default_parallelism
    if workers % dispatchers:
        raise ValueError(
            f"the number of workers must be a multiple of the number of dispatchers, but the "
            f"cluster runs {workers} tasks at once (spark.default.parallelism) and {dispatchers} "
            f"dispatchers were asked for"
        )
    key = new_key()
    listen, _ = cluster.driver_addresses()
    service = ComputeService(dispatchers, workers // dispatchers, key, nics=[listen])
    config = TfDataServiceConfig(
        dispatchers,
        workers // dispatchers,
        dispatcher_side,
        service.addresses(),
        key,
        timeout=math.ceil(Config.from_env().spark_start_timeout),  # Spark has to start tasks first
    )
    try:
        config.write(configfile)
        print(
            f"TF data service with {workers} worker(s) and {dispatchers} dispatcher(s) on the "
            f"{dispatcher_side} side; training processes find it through {configfile}",
            flush=True,
        )
        run(compute_worker_fn, args=(config,), num_proc=workers)
    finally:
        remove_configuration(configfile, config)
        service.shutdown()


def run_commandline(arguments: Sequence[str] | None = None) -> None:
    from horovod.tensorflow.data.compute_worker import make_parser

    parser = make_parser("python -m horovod.spark.tensorflow.compute_worker", _DESCRIPTION)
    given = parser.parse_args(arguments)
    main(given.dispatchers, given.dispatcher_side, given.configfile)


if __name__ == "__main__":
    run_commandline()
