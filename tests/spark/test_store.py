"""Stores: paths, protocols, complete files only, synchronising, errors."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as arrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from horovod.spark.common.reading.parquet_files import ParquetFiles
from horovod.spark.common.store import (
    AbstractFilesystemStore,
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
)
from horovod.spark.common.stores.hdfs import HadoopFiles, look_at
from tests.forked_python import forked_python
from tests.ports import reserved_port
from tests.spark.cluster import HANG, REPOSITORY
from tests.spark.parquet import points, write


def run_program(program: str, *arguments: str, **settings: str) -> Any:
    """A program in a process of its own, with variables that it finds in its environment."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [*forked_python(), "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, "PYTHONPATH": path, **settings},
    )


def test_a_bare_path_is_a_file_url(tmp_path: Path):
    store = Store.create(str(tmp_path))
    assert type(store) is FilesystemStore
    assert store.prefix_path == f"file://{tmp_path}"
    assert Store.create(f"file://{tmp_path}").prefix_path == store.prefix_path


def test_default_paths(tmp_path: Path):
    store = Store.create(str(tmp_path))
    base = f"file://{tmp_path}"
    assert store.get_train_data_path() == f"{base}/intermediate_train_data"
    assert store.get_train_data_path(3) == f"{base}/intermediate_train_data.3"
    assert store.get_val_data_path(0) == f"{base}/intermediate_val_data.0"
    assert store.get_test_data_path() == f"{base}/intermediate_test_data"
    assert store.get_runs_path() == f"{base}/runs"
    assert store.get_run_path("r") == f"{base}/runs/r"
    assert store.get_checkpoint_path("r") == f"{base}/runs/r/checkpoint"
    assert store.get_logs_path("r") == f"{base}/runs/r/logs"
    assert store.get_checkpoint_filename() == "checkpoint"
    assert store.get_logs_subdir() == "logs"
    assert store.saving_runs()


def test_paths_that_were_given(tmp_path: Path):
    store = Store.create(
        str(tmp_path),
        train_path=str(tmp_path / "t"),
        val_path="s3://other/v",
        runs_path=str(tmp_path / "r"),
        save_runs=False,
        checkpoint_filename="point",
    )
    assert store.get_train_data_path(1) == f"file://{tmp_path}/t.1"
    assert store.get_val_data_path() == "s3://other/v"
    assert store.get_checkpoint_filename() == "point"
    assert not store.saving_runs()
    assert store.get_checkpoint_path("x") is None
    assert store.get_logs_path("x") is None
    remote = store.to_remote("x", 2)
    assert remote.train_data_path == f"file://{tmp_path}/t.2"
    assert remote.run_path == f"file://{tmp_path}/r/x"
    assert (remote.checkpoint_path, remote.saving_runs) == (None, False)


@pytest.mark.parametrize("prefix", ["{folder}", "memory://stores/contract"])
def test_files_on_any_file_system(tmp_path: Path, prefix: str):
    store = Store.create(prefix.format(folder=tmp_path))
    check_files(store, tmp_path)
    check_files(pickle.loads(pickle.dumps(store)), tmp_path)


def check_files(store: Any, tmp_path: Path) -> None:
    path = f"{store.prefix_path}/a/b.txt"
    store.remove(path)
    assert not store.exists(path)
    store.write_text(path, "first")
    store.write_text(path, "second")
    assert store.exists(path)
    assert store.read(path) == b"second"
    store.write(path, b"\x00\x01")
    assert store.read(path) == b"\x00\x01"
    store.check_writable()
    folder = store.get_localized_path(f"{store.prefix_path}/a")
    assert [name.rpartition("/")[2] for name in store.fs.ls(folder, detail=False)] == ["b.txt"]
    local = tmp_path / "local.txt"
    local.write_text("copied")
    store.upload(str(local), f"{store.prefix_path}/copied.txt")
    assert store.read(f"{store.prefix_path}/copied.txt") == b"copied"
    store.remove(f"{store.prefix_path}/a")
    assert not store.exists(path)


class OnArrow(HDFSStore):
    """HDFS's store with pyarrow's local files below: the same wrapper, without a cluster."""

    def _open_filesystem(self) -> Any:
        return HadoopFiles(arrow.LocalFileSystem())


def test_the_operations_of_hdfs(tmp_path: Path):
    check_files(OnArrow(f"hdfs://namenode:8020{tmp_path}/hdfs"), tmp_path)


def test_a_file_that_was_being_replaced_when_its_writer_died(tmp_path: Path):
    """HDFS does not rename onto a file: the old one has another name for a moment."""
    store = OnArrow(f"hdfs://namenode:8020{tmp_path}/hdfs")
    path = f"{store.prefix_path}/checkpoint"
    store.write_text(path, "old")
    (tmp_path / "hdfs" / "checkpoint").rename(tmp_path / "hdfs" / ".checkpoint.previous")
    assert store.exists(path)
    assert store.read(path) == b"old"
    store.write_text(path, "new")
    assert store.read(path) == b"new"
    assert os.listdir(tmp_path / "hdfs") == ["checkpoint"]
    (tmp_path / "hdfs" / ".checkpoint.previous").touch()
    store.remove(path)
    assert not store.exists(path)


def test_hdfs_without_a_classpath(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CLASSPATH", raising=False)
    with pytest.raises(ConnectionError, match=r"CLASSPATH is not set.*hadoop classpath --glob"):
        HDFSStore("hdfs://namenode:8020/user/me").check_writable()


WITHOUT_LIBHDFS = """
import os
from horovod.spark.common.store import Store
try:
    Store.create("hdfs://namenode/user/me").check_writable()
except ConnectionError as error:
    print(error, os.environ["LIBHDFS_OPTS"], sep="\\n")
"""


def test_hdfs_without_libhdfs(tmp_path: Path):
    """In a process of its own, because a libhdfs that is loaded stays."""
    settings = {
        "CLASSPATH": "nothing.jar",
        "ARROW_LIBHDFS_DIR": str(tmp_path),
        "HADOOP_HOME": str(tmp_path),
        "LIBHDFS_OPTS": "-Xmx1g",
    }
    printed = run_program(WITHOUT_LIBHDFS, **settings).stdout
    assert re.match(r"cannot connect to hdfs://namenode: Unable to load.*ARROW_LIBHDFS", printed)
    assert printed.splitlines()[1:] == ["-Xmx1g -Xrs"], "Java must not take Ctrl-C"


def test_a_namenode_that_does_not_listen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLASSPATH", "nothing.jar")
    with reserved_port() as port:
        server = f"hdfs://127.0.0.1:{port}"
        store = HDFSStore(f"{server}/user/me")
        wanted = f"the NameNode of {server} does not answer: .*refused.*Check that it runs"
        for use in (
            lambda: store.exists(store.get_checkpoint_path("run")),
            lambda: store.get_checkpoints("run"),
            lambda: store.write_text(f"{store.prefix_path}/a", "a"),
            lambda: store.is_parquet_dataset(store.get_train_data_path()),
            lambda: ParquetFiles(store.get_train_data_path(), store.storage_options),
        ):
            with pytest.raises(ConnectionError, match=wanted):
                use()


class Unreachable(arrow.FileSystemHandler):
    """As pyarrow's HDFS is while the NameNode is away: nothing is there, and listing fails."""

    def get_file_info(self, paths: list[str]) -> Any:
        return [arrow.FileInfo(path, arrow.FileType.NotFound) for path in paths]

    def get_file_info_selector(self, selector: Any) -> Any:
        raise OSError(255, "Unknown error 255")

    def _none(self, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError

    get_type_name = normalize_path = create_dir = delete_dir = delete_dir_contents = _none
    delete_root_dir_contents = delete_file = move = copy_file = open_input_stream = _none
    open_input_file = open_output_stream = open_append_stream = _none


def test_an_unreachable_namenode_is_not_an_empty_store():
    away = arrow.PyFileSystem(Unreachable())
    with pytest.raises(OSError, match="Unknown error 255"):
        look_at(away, "/user/me/checkpoint")


def test_a_path_of_hdfs_that_is_not_there(tmp_path: Path):
    there = look_at(arrow.LocalFileSystem(), f"{tmp_path}")
    missing = look_at(arrow.LocalFileSystem(), f"{tmp_path}/a/b")
    assert (there.type, missing.type) == (arrow.FileType.Directory, arrow.FileType.NotFound)


def test_only_what_has_changed_is_synchronised(tmp_path: Path):
    store = Store.create(str(tmp_path / "store"))
    remote = store.to_remote("run", None)
    with remote.get_local_output_dir() as folder:
        local = Path(folder)
        (local / "logs").mkdir()
        (local / "logs" / "a").write_text("1")
        (local / "checkpoint").write_text("one")
        remote.sync(folder)
        run = tmp_path / "store" / "runs" / "run"
        assert (run / "logs" / "a").read_text() == "1"
        assert (run / "checkpoint").read_text() == "one"
        (run / "logs" / "a").write_text("changed in the store")
        (local / "checkpoint").write_text("two!")
        remote.sync(folder)
        assert (run / "checkpoint").read_text() == "two!"
        assert (run / "logs" / "a").read_text() == "changed in the store", "was not copied again"
    assert not local.exists()


def test_checkpoints_of_a_run_the_oldest_first(tmp_path: Path):
    store = Store.create(str(tmp_path))
    assert store.get_checkpoints("r") == []
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    for age, name in enumerate(["b.ckpt", "a.ckpt", "other"]):
        (run / name).touch()
        os.utime(run / name, (1000 + age, 1000 + age))
    names = [os.path.basename(path) for path in store.get_checkpoints("r")]
    assert names == ["b.ckpt", "a.ckpt"]
    assert store.read(store.get_checkpoints("r")[0]) == b""


def test_checkpoints_can_be_read_where_they_were_found():
    store = Store.create("memory://stores/checkpoints")
    store.write(f"{store.get_run_path('r')}/epochs/a.ckpt", b"a")
    (found,) = store.get_checkpoints("r")
    assert found == "memory://stores/checkpoints/runs/r/epochs/a.ckpt"
    assert store.read(found) == b"a"


def test_only_complete_parquet_is_a_dataset(tmp_path: Path):
    store = Store.create(str(tmp_path))
    data = write(tmp_path / "data", points(10))
    path = f"file://{data}"
    assert store.is_parquet_dataset(path)
    assert store.get_parquet_dataset(path).count_rows() == 10
    (data / "_SUCCESS").unlink()
    assert store.is_parquet_dataset(path), "others write no _SUCCESS"
    (data / "_temporary").mkdir()
    assert not store.is_parquet_dataset(path), "Spark has not finished"
    assert not store.is_parquet_dataset(f"{path}/nothing")
    (tmp_path / "empty").mkdir()
    assert not store.is_parquet_dataset(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("given", "host", "port", "prefix"),
    [
        ("hdfs://namenode:8020/user/me", "namenode", 8020, "hdfs://namenode:8020/user/me"),
        ("hdfs:///user/me", "default", 0, "hdfs:///user/me"),
        ("/user/me", "default", 0, "hdfs:///user/me"),
        ("hdfs://namenode/user", "namenode", 0, "hdfs://namenode/user"),
    ],
)
def test_hdfs_paths(given: str, host: str, port: int, prefix: str):
    store = HDFSStore(given)
    assert (store._host, store._port) == (host, port)
    assert store.prefix_path == prefix
    path = store.get_localized_path(given)
    assert store.get_localized_path(store.get_runs_path()) == f"{path}/runs"
    assert store.storage_options["host"] == host


@pytest.mark.parametrize(
    "path", ["", "s3://bucket/x", "file:///x", "hdfs://namenode:8020", "hdfs://h:port/x"]
)
def test_hdfs_paths_that_are_none(path: str):
    with pytest.raises(ValueError):
        HDFSStore(path)


def test_create_chooses_by_the_form_of_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert isinstance(Store.create("hdfs:///x"), HDFSStore)
    assert type(Store.create("/dbfs/x")) is FilesystemStore
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    assert isinstance(Store.create("/dbfs/x"), DBFSLocalStore)
    assert isinstance(Store.create("dbfs:/x"), DBFSLocalStore)
    assert type(Store.create(str(tmp_path))) is FilesystemStore


@pytest.mark.parametrize(
    "path", ["/dbfs/tmp/x", "dbfs:/tmp/x", "file:/dbfs/tmp/x", "file:///dbfs/tmp/x"]
)
def test_dbfs_paths(path: str):
    store = DBFSLocalStore(path)
    assert store.prefix_path == "file:///dbfs/tmp/x"
    assert store.get_checkpoint_filename() == "checkpoint.tf"


@pytest.mark.parametrize("path", ["dbfs://tmp/x", "/tmp/x", "s3://x"])
def test_dbfs_paths_that_are_none(path: str):
    with pytest.raises(ValueError, match="not a path of DBFS"):
        DBFSLocalStore(path)


def test_the_old_name_warns(tmp_path: Path):
    with pytest.warns(DeprecationWarning, match="FilesystemStore"):
        assert isinstance(LocalStore(str(tmp_path)), AbstractFilesystemStore)


def test_a_place_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").touch()
    for prefix in (tmp_path / "file" / "below", Path("/proc/1/nothing")):
        store = Store.create(str(prefix))
        with pytest.raises(OSError, match=r"cannot write .*choose another prefix"):
            store.check_writable()


class NotConnected(OSError):
    """As that of aiohttp, which Google's client uses."""

    def __init__(self, host: str, cause: OSError) -> None:
        self.host, self.cause = host, cause

    def __str__(self) -> str:
        return f"no connection to {self.host}.\nerrno {self.cause.errno}"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("no container.\nRequestId: 1"), "RuntimeError: no container"),  # Azure
        (NotConnected("here", OSError()), "NotConnected: no connection to here"),
    ],
)
def test_a_client_with_exceptions_of_its_own(raised: Exception, said: str):
    class Refusing(MemoryFileSystem):
        protocol = "refusing"

        def _open(self, *arguments: Any, **more: Any) -> Any:
            raise raised

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    store = Store.create("refusing://container/x")
    with pytest.raises(OSError, match=rf"{said}\. Nothing is there.*another prefix"):
        store.check_writable()


FULL_DISK = """
import resource, sys
from horovod.spark.common.store import Store
store = Store.create(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.write(sys.argv[1] + "/big", b"x" * 1_000_000)
except OSError as error:
    print(error)
"""


def test_a_disk_that_fills_up_while_writing_leaves_what_was_there(tmp_path: Path):
    """The limit on file sizes makes write fail halfway, as a full disk does."""
    (tmp_path / "big").write_text("old")
    done = run_program(FULL_DISK, str(tmp_path))
    assert "cannot write" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "big").read_text() == "old"
    assert os.listdir(tmp_path) == ["big"], "nothing half-written is left"
