"""The TF data service on Spark: the driver serves, tasks prepare data, this process trains."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start Java
COUNT = 20


def test_tasks_prepare_data(whole: Any, tmp_path: Path):
    tf = pytest.importorskip("tensorflow")
    from horovod.spark.tensorflow import compute_worker
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    file = tmp_path / "service.json"
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            compute_worker.run_commandline([str(file), "--dispatchers", "1"])
        except BaseException as error:
            failures.append(error)

    server = threading.Thread(target=serve)
    server.start()
    config = TfDataServiceConfig.read(str(file), wait_for_file_creation=True)
    assert (config.dispatchers, config.workers_per_dispatcher) == (1, 2)
    dataset = tf.data.Dataset.range(COUNT).map(lambda x: x * x)
    found = [int(x) for x in dataset.send_to_data_service(config, rank=0, size=1)]
    config.compute_client().shutdown()
    server.join()
    assert failures == []
    assert sorted(found) == [n * n for n in range(COUNT)]
    assert not file.exists()


def test_workers_are_divided_evenly(spark: Any, tmp_path: Path):
    pytest.importorskip("tensorflow")
    from horovod.spark.tensorflow.compute_worker import main

    with pytest.raises(ValueError, match=r"runs 2 tasks at once .* and 3 dispatchers"):
        main(3, "compute", str(tmp_path / "service.json"))
