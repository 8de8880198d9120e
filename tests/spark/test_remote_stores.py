"""Stores on file systems that run elsewhere: HDFS, S3, Google Cloud Storage, Azure.

HOROVOD_TEST_STORES names those to test, as URLs of folders that may be filled and emptied:

    HOROVOD_TEST_STORES="hdfs://127.0.0.1:8020/tests gs://bucket/tests abfs://container/tests"

What their clients need is in the environment: libhdfs and CLASSPATH for HDFS, STORAGE_EMULATOR_HOST
or credentials for gcsfs, AZURE_STORAGE_CONNECTION_STRING for adlfs, and so on. CONTRIBUTING.md says
how to start all of them on one machine.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from horovod.spark.common.reading.parquet_files import ParquetFiles
from horovod.spark.common.store import Store
from tests.ports import reserved_port
from tests.spark.parquet import PATIENCE, points, write
from tests.spark.test_store import check_files, run_program

URLS = os.environ.get("HOROVOD_TEST_STORES", "").split()
HDFS = [url for url in URLS if url.startswith("hdfs://")]
OTHERS = [url for url in URLS if url not in HDFS]

pytestmark = [
    pytest.mark.timeout(PATIENCE),
    # Their clients leave connections to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def remote(urls: list[str], what: str) -> Any:
    """The tests of these; one that says why, if there are none."""
    none = pytest.param(None, marks=pytest.mark.skip(f"HOROVOD_TEST_STORES names no {what}"))
    return pytest.mark.parametrize("store", urls or [none], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Any:
    store = Store.create(f"{request.param.rstrip('/')}/{uuid.uuid4().hex}")
    yield store
    store.remove(store.prefix_path)


def fill(store: Any, local: Path, path: str, rows: int = 96) -> None:
    """Parquet, as some other program may have put it there."""
    for file in sorted(write(local, points(rows)).iterdir()):
        store.upload(str(file), f"{path}/{file.name}")


def torch_estimator(store: Any, **more: Any) -> Any:
    import torch

    from horovod.spark.torch import TorchEstimator

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    given = {
        "num_proc": 2,
        "store": store,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "run_id": "run",
        "random_seed": 1,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **more})


def check_training(estimator: Any, fit: Any, frame: Any) -> None:
    """Train, predict, and go on where the run ended."""
    store = estimator.getStore()
    first = fit()
    losses = [epoch["train"]["loss"] for epoch in first.getHistory()]
    assert losses[1] < losses[0]
    logs = store.read(f"{store.get_logs_path('run')}/history.jsonl").decode()
    assert len(logs.splitlines()) == 2
    assert len(store.read(store.get_checkpoint_path("run"))) > 100
    again = fit()
    assert again.getHistory()[0]["train"]["loss"] < losses[1], "it began anew"
    predicted = again.transform(frame).select("y", "y__output").collect()
    assert all(abs(row["y"] - row["y__output"]) < 5 for row in predicted)


@remote(URLS, "store")
def test_files(store: Any, tmp_path: Path):
    check_files(store, tmp_path)
    check_files(pickle.loads(pickle.dumps(store)), tmp_path)


@remote(URLS, "store")
def test_what_is_not_there(store: Any):
    path = f"{store.prefix_path}/nothing"
    assert not store.exists(path)
    assert not store.is_parquet_dataset(path)
    assert store.get_checkpoints("r") == []
    store.remove(path)
    with pytest.raises(FileNotFoundError):
        store.read(path)
    with pytest.raises(FileNotFoundError, match="no Parquet data"):
        ParquetFiles(path, store.storage_options)


@remote(URLS, "store")
def test_checkpoints_and_logs_follow_the_local_folder(store: Any):
    to = store.to_remote("run", None)
    with to.get_local_output_dir() as folder:
        local = Path(folder)
        (local / "logs").mkdir()
        for name in ("b.ckpt", "a.ckpt"):
            (local / name).write_text(name)
            (local / "logs" / "events").write_text(name)
            to.sync(folder)
        (local / "b.ckpt").write_text("changed")
        to.sync(folder)
    assert store.read(f"{store.get_logs_path('run')}/events") == b"a.ckpt"
    found = store.get_checkpoints("run")
    assert sorted(map(store.read, found)) == [b"a.ckpt", b"changed"]


@remote(URLS, "store")
def test_only_complete_parquet_is_read(store: Any, tmp_path: Path):
    path = store.get_train_data_path(0)
    fill(store, tmp_path / "data", path)
    assert store.is_parquet_dataset(path)
    assert store.get_parquet_dataset(path).count_rows() == 96
    store.remove(f"{path}/_SUCCESS")
    store.write(f"{path}/_temporary/0/part-9.parquet", b"half")
    assert not store.is_parquet_dataset(path), "Spark has not finished"


@remote(URLS, "store")
def test_training_from_parquet(store: Any, whole: Any, tmp_path: Path):
    fill(store, tmp_path / "data", store.get_train_data_path())
    fill(store, tmp_path / "val", store.get_val_data_path(), rows=24)
    estimator = torch_estimator(store, validation=0.2)
    frame = whole.read.parquet(f"file://{tmp_path / 'data'}")
    check_training(estimator, estimator.fit_on_parquet, frame)


@remote(HDFS, "HDFS")
def test_training_from_a_dataframe(store: Any, whole: Any, tmp_path: Path):
    frame = whole.read.parquet(f"file://{write(tmp_path / 'data', points())}")
    estimator = torch_estimator(store, validation=0.2)
    check_training(estimator, lambda: estimator.fit(frame), frame)


@remote(OTHERS, "object storage")
def test_spark_without_the_connector_names_it(store: Any, whole: Any, tmp_path: Path):
    frame = whole.read.parquet(f"file://{write(tmp_path / 'data', points())}")
    with pytest.raises(OSError, match=r"Spark has no connector for .*spark\.jars\.packages"):
        torch_estimator(store).fit(frame)
    assert not store.exists(store.get_runs_path())


@remote(HDFS, "HDFS")
def test_a_namenode_that_is_not_there(store: Any):
    with reserved_port() as port:
        away = Store.create(f"hdfs://127.0.0.1:{port}/x")
        for use in (
            lambda: away.exists(f"{away.prefix_path}/checkpoint"),
            lambda: away.get_checkpoints("r"),
            lambda: away.write_text(f"{away.prefix_path}/a", "a"),
            lambda: torch_estimator(away).fit_on_parquet(),
            lambda: ParquetFiles(away.get_train_data_path(), away.storage_options),
        ):
            with pytest.raises(ConnectionError, match=r"NameNode of hdfs://.* does not answer"):
                use()


@remote(HDFS, "HDFS")
def test_files_have_the_replication_that_the_cluster_sets(store: Any):
    """A cluster of one DataNode sets 1; the client's own default would be 3."""
    path = f"{store.prefix_path}/a"
    store.write_text(path, "a")
    shell = "org.apache.hadoop.fs.FsShell"
    printed = subprocess.run(
        ["java", shell, "-stat", "%r", path], capture_output=True, text=True, timeout=200
    )
    assert printed.stdout.split() == ["1"], printed


INTERRUPTED = """
import os, signal, sys, time
from horovod.spark.common.store import Store
store = Store.create(sys.argv[1])
store.exists(store.prefix_path)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)
except KeyboardInterrupt:
    print("told")
"""


@remote(HDFS, "HDFS")
def test_ctrl_c_is_still_an_exception(store: Any):
    done = run_program(INTERRUPTED, store.prefix_path)
    assert (done.stdout.split(), done.returncode) == (["told"], 0), done
