"""Where an estimator keeps its data, checkpoints and logs: a prefix on some file system.

All stores work through fsspec (HDFS through pyarrow's own client). A file appears under its name
only when it is complete: it is written beside and moved, or put in one piece where the storage
itself makes that atomic.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import tempfile
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from horovod.spark.common.filesystem import split_hdfs, split_url
from horovod.spark.common.remote_store import RemoteStore

# Object stores show a new object when all of it is there, and cannot move without copying.
_PUT_IS_ATOMIC = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}


class Store(ABC):
    """The interface of all stores; `Store.create` chooses one by the form of the path."""

    storage_options: dict[str, Any] | None = None  # what fsspec needs to open the paths

    @abstractmethod
    def is_parquet_dataset(self, path: str) -> bool:
        """Whether there is complete Parquet data at `path`."""

    @abstractmethod
    def get_parquet_dataset(self, path: str) -> Any:
        """The Parquet data at `path`, as a `pyarrow.dataset.Dataset`."""

    @abstractmethod
    def get_train_data_path(self, idx: int | None = None) -> str: ...

    @abstractmethod
    def get_val_data_path(self, idx: int | None = None) -> str: ...

    @abstractmethod
    def get_test_data_path(self, idx: int | None = None) -> str: ...

    @abstractmethod
    def saving_runs(self) -> bool:
        """Whether checkpoints and logs are kept."""

    @abstractmethod
    def get_runs_path(self) -> str: ...

    @abstractmethod
    def get_run_path(self, run_id: str) -> str: ...

    @abstractmethod
    def get_checkpoint_path(self, run_id: str) -> str | None: ...

    @abstractmethod
    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """The checkpoint files of a run, the oldest first."""

    @abstractmethod
    def get_logs_path(self, run_id: str) -> str | None: ...

    @abstractmethod
    def get_checkpoint_filename(self) -> str: ...

    @abstractmethod
    def get_logs_subdir(self) -> str: ...

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def read(self, path: str) -> bytes: ...

    @abstractmethod
    def write(self, path: str, data: bytes) -> None: ...

    @abstractmethod
    def write_text(self, path: str, text: str) -> None: ...

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete a file or a folder, if it is there."""

    @abstractmethod
    def check_writable(self) -> None:
        """OSError, before anything is touched, if this process cannot write to the store."""

    @abstractmethod
    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        """A function that gives a context manager: the local folder a rank writes into."""

    @abstractmethod
    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """A function that copies what is new in a local folder to the run's path."""

    def to_remote(self, run_id: str, dataset_idx: int | None) -> RemoteStore:
        """What the ranks need to know of this store."""
        return RemoteStore(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
            storage_options=self.storage_options,
        )

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """The store for a path: HDFS, DBFS on Databricks, or whatever fsspec opens."""
        prefix_path = os.fspath(prefix_path)
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **kwargs)
        if is_databricks() and DBFSLocalStore.matches_dbfs(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)


def is_databricks() -> bool:
    """Whether this is the Databricks runtime."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


class AbstractFilesystemStore(Store):
    """A store whose paths are URLs under one prefix of one file system."""

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.prefix_path = self.get_full_path(prefix_path)
        self._train_path = self._full_path_or(train_path, "intermediate_train_data")
        self._val_path = self._full_path_or(val_path, "intermediate_val_data")
        self._test_path = self._full_path_or(test_path, "intermediate_test_data")
        self._runs_path = self._full_path_or(runs_path, "runs")
        self._save_runs = save_runs
        self.storage_options = storage_options
        self._checkpoint_filename = checkpoint_filename
        self._filesystem: Any = None

    def _full_path_or(self, path: str | None, name: str) -> str:
        return self.get_full_path(path) if path else posixpath.join(self.prefix_path, name)

    # -- the file system ---------------------------------------------------------------------

    @abstractmethod
    def get_full_path(self, path: str) -> str:
        """A path with the protocol before it."""

    @abstractmethod
    def get_localized_path(self, path: str) -> str:
        """A path as the file system wants it."""

    @abstractmethod
    def _open_filesystem(self) -> Any: ...

    @property
    def fs(self) -> Any:
        """The fsspec file system, opened when it is first used."""
        if self._filesystem is None:
            self._filesystem = self._open_filesystem()
        return self._filesystem

    def get_filesystem(self) -> Any:
        return self.fs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_filesystem": None}  # connections do not travel

    def exists(self, path: str) -> bool:
        return bool(self.fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        with self.fs.open(self.get_localized_path(path), "rb") as file:
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        target = self.get_localized_path(path)

        def put(name: str) -> None:
            with self.fs.open(name, "wb") as file:
                file.write(data)

        self._put_complete(target, put)

    def write_text(self, path: str, text: str) -> None:
        self.write(path, text.encode())

    def upload(self, local: str, path: str) -> None:
        """Copy a local file to `path`."""
        self._put_complete(
            self.get_localized_path(path), lambda name: self.fs.put_file(local, name)
        )

    def _put_complete(self, target: str, put: Callable[[str], None]) -> None:
        """Have `put` write a file that nobody sees before it is complete."""
        folder, name = posixpath.split(target)
        atomic = bool(_PUT_IS_ATOMIC & set(_protocols(self.fs)))
        temporary = target if atomic else posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")
        try:
            self.fs.makedirs(folder, exist_ok=True)
            put(temporary)
            if not atomic:
                self._move(temporary, target)
        except OSError as error:
            if not atomic:
                with contextlib.suppress(OSError):
                    self.fs.rm_file(temporary)
            raise type(error)(
                error.errno,
                f"cannot write {target}: {error.strerror or error}. "
                "Nothing is there under that name that was not there before; check the rights of "
                f"this user and the room below {self.prefix_path}, or choose another prefix",
            ) from error

    def _move(self, temporary: str, target: str) -> None:
        if "file" in _protocols(self.fs):
            os.replace(temporary, target)
            return
        if self.fs.exists(target):  # HDFS does not rename onto a file
            self.fs.rm_file(target)
        self.fs.mv(temporary, target)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.get_localized_path(path), recursive=True)

    def check_writable(self) -> None:
        probe = posixpath.join(self.prefix_path, f".probe.{uuid.uuid4().hex}")
        self.write(probe, b"")
        self.fs.rm_file(self.get_localized_path(probe))

    # -- Parquet -----------------------------------------------------------------------------

    def is_parquet_dataset(self, path: str) -> bool:
        local = self.get_localized_path(path)
        try:
            names = {posixpath.basename(name) for name in self.fs.ls(local, detail=False)}
        except (FileNotFoundError, NotADirectoryError):
            return False
        if "_temporary" in names and "_SUCCESS" not in names:
            return False  # Spark has not finished writing it, or failed to
        return any(name.endswith((".parquet", ".parq")) for name in names) or any(
            found.endswith((".parquet", ".parq")) for found in self.fs.find(local)
        )

    def get_parquet_dataset(self, path: str) -> Any:
        from horovod.spark.common.reader import ParquetFiles

        return ParquetFiles(path, self.storage_options).dataset

    def get_train_data_path(self, idx: int | None = None) -> str:
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: int | None = None) -> str:
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def get_data_metadata_path(self, path: str) -> str:
        """Where what was found out about the data at `path` is kept."""
        return f"{path.rstrip('/')}_cached_metadata.json"

    # -- runs --------------------------------------------------------------------------------

    def saving_runs(self) -> bool:
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        if not self._save_runs:
            return None
        return posixpath.join(self.get_run_path(run_id), self.get_checkpoint_filename())

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        folder = self.get_localized_path(self.get_run_path(run_id))
        if not self._save_runs or not self.fs.exists(folder):
            return []
        found = [name for name in self.fs.find(folder) if name.endswith(suffix)]
        return sorted(found, key=lambda name: (_modified(self.fs, name), name))

    def get_logs_path(self, run_id: str) -> str | None:
        if not self._save_runs:
            return None
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir())

    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename or "checkpoint"

    def get_logs_subdir(self) -> str:
        return "logs"

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        return _local_output_dir

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        return _Sync(self, self.get_run_path(run_id))

    def read_serialized_keras_model(
        self, ckpt_path: str, model: Any, custom_objects: dict[str, Any] | None = None
    ) -> str:
        """The Keras model in a checkpoint, as text that `KerasModel` and the ranks understand."""
        from horovod.spark.keras.serialization import as_text, model_from_bytes

        custom = custom_objects or {}
        return as_text(model_from_bytes(self.read(ckpt_path), model, custom), custom)


class _Sync:
    """Copies files of a local folder that are new or have changed since the last call."""

    def __init__(self, store: AbstractFilesystemStore, run_path: str) -> None:
        self._store = store
        self._run_path = run_path
        self._seen: dict[str, tuple[int, int]] = {}

    def __call__(self, local_run_path: str) -> None:
        for folder, _, names in os.walk(local_run_path):
            for name in names:
                local = os.path.join(folder, name)
                facts = os.stat(local)
                state = (facts.st_mtime_ns, facts.st_size)
                if self._seen.get(local) != state:
                    relative = os.path.relpath(local, local_run_path)
                    self._store.upload(local, posixpath.join(self._run_path, relative))
                    self._seen[local] = state


@contextlib.contextmanager
def _local_output_dir() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="horovod_run_")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    found = filesystem.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def _modified(filesystem: Any, path: str) -> float:
    try:
        return float(filesystem.modified(path).timestamp())
    except NotImplementedError:
        return 0.0


class FilesystemStore(AbstractFilesystemStore):
    """A store on anything that fsspec opens: file, s3, gs, abfs and many more."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        self._protocol, _ = split_url(os.fspath(prefix_path))
        super().__init__(os.fspath(prefix_path), *args, **kwargs)

    def get_full_path(self, path: str) -> str:
        protocol, rest = split_url(path)
        if "://" in path:
            return path
        if protocol == "file":
            return "file://" + os.path.abspath(rest)
        return path

    def get_localized_path(self, path: str) -> str:
        return str(self.fs._strip_protocol(self.get_full_path(path)))

    def _open_filesystem(self) -> Any:
        import fsspec

        return fsspec.core.url_to_fs(self.prefix_path, **(self.storage_options or {}))[0]

    def copy(self, lpath: str, rpath: str, recursive: bool = False, **kwargs: Any) -> None:
        """Copy a local file or folder into the store."""
        self.fs.put(lpath, self.get_localized_path(rpath), recursive=recursive, **kwargs)


class LocalStore(FilesystemStore):
    """The old name of a `FilesystemStore` on local files."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "LocalStore is deprecated: use FilesystemStore, or Store.create",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(prefix_path, *args, **kwargs)


class HDFSStore(AbstractFilesystemStore):
    """A store on HDFS, through pyarrow's client (libhdfs, which needs Hadoop on every host)."""

    FS_PREFIX = "hdfs://"

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: dict[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            raise ValueError(f"driver must be 'libhdfs', the only one pyarrow has, not {driver!r}")
        if not prefix_path:
            raise ValueError("prefix_path is empty: give a path of HDFS")
        url_host, url_port, _ = split_hdfs(prefix_path)
        self._host = host or url_host or "default"
        self._port = port or url_port or 0
        self._user, self._kerb_ticket, self._extra_conf = user, kerb_ticket, extra_conf
        authority = "" if self._host == "default" else self._host
        if authority and self._port:
            authority += f":{self._port}"
        self._url_prefix = f"hdfs://{authority}"
        super().__init__(prefix_path, *args, **kwargs)
        self.storage_options = {
            "host": self._host,
            "port": self._port,
            "user": user,
            "kerb_ticket": kerb_ticket,
            "extra_conf": extra_conf,
            **(self.storage_options or {}),
        }

    @classmethod
    def matches(cls, path: str) -> bool:
        return path.startswith(cls.FS_PREFIX)

    def get_full_path(self, path: str) -> str:
        return self._url_prefix + split_hdfs(path)[2]

    def get_localized_path(self, path: str) -> str:
        return split_hdfs(path)[2]

    def _open_filesystem(self) -> Any:
        from fsspec.implementations.arrow import HadoopFileSystem

        return HadoopFileSystem(
            self._host,
            self._port,
            user=self._user,
            kerb_ticket=self._kerb_ticket,
            extra_conf=self._extra_conf,
        )


class DBFSLocalStore(FilesystemStore):
    """A store on the Databricks file system, as every host has it mounted below /dbfs."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **kwargs)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        return path.startswith(("/dbfs/", "dbfs:/", "file:/dbfs/", "file:///dbfs/")) and (
            not path.startswith("dbfs://")
        )

    @staticmethod
    def normalize_path(path: str) -> str:
        """The path below /dbfs that a path of DBFS is mounted at."""
        if not DBFSLocalStore.matches_dbfs(path):
            raise ValueError(
                f"{path!r} is not a path of DBFS: give /dbfs/..., dbfs:/..., file:/dbfs/... or "
                "file:///dbfs/..."
            )
        for prefix in ("dbfs:", "file://", "file:"):
            if path.startswith(prefix):
                path = path[len(prefix) :]
                return path if path.startswith("/dbfs/") else "/dbfs" + path
        return path

    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename or "checkpoint.tf"
