"""The base class of the stores here: a store on one file system of fsspec.

A file appears under its name only when it is complete: it is written under another name and moved,
or put in one piece where the storage itself makes that atomic.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import posixpath
import tempfile
import uuid
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from horovod.spark.common.stores.store_base import Store

# Object stores show a new object when all of it is there, and cannot move without copying.
_PUT_IS_ATOMIC = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}


class AbstractFilesystemStore(Store):
    """Base class of stores that keep everything under one folder of one file system.

    Args:
        prefix_path: Folder or URL under which everything is kept.
        train_path: Folder of the training data. By default `intermediate_train_data` under the
            prefix.
        val_path: Folder of the validation data. By default `intermediate_val_data` under the
            prefix.
        test_path: Folder of the test data. By default `intermediate_test_data` under the prefix.
        runs_path: Folder of checkpoints and logs. By default `runs` under the prefix.
        save_runs: Whether checkpoints and logs are kept. The default is True.
        storage_options: Dict of options for the fsspec file system, such as credentials. By default
            it finds them itself.
        checkpoint_filename: File name of checkpoints. By default `checkpoint`.
        **kwargs: Nothing further; subclasses may take more.
    """

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
        """Return a path with the protocol before it.

        Args:
            path: Path in the store.
        """

    @abstractmethod
    def get_localized_path(self, path: str) -> str:
        """Return a path in the form that the file system wants.

        Args:
            path: Path in the store.
        """

    @abstractmethod
    def _open_filesystem(self) -> Any: ...

    @property
    def fs(self) -> Any:
        """The fsspec file system, opened when it is first used."""
        if self._filesystem is None:
            self._filesystem = self._open_filesystem()
        return self._filesystem

    def get_filesystem(self) -> Any:
        """Return the fsspec file system, which is opened when it is first used."""
        return self.fs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_filesystem": None}  # connections do not travel

    def exists(self, path: str) -> bool:
        return any(self.fs.exists(name) for name in self._names(path))

    def read(self, path: str) -> bytes:
        for name in self._names(path):
            with contextlib.suppress(FileNotFoundError), self.fs.open(name, "rb") as file:
                return bytes(file.read())
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def write(self, path: str, data: bytes) -> None:
        target = self.get_localized_path(path)

        def put(name: str) -> None:
            with self.fs.open(name, "wb") as file:
                file.write(data)

        self._put_complete(target, put)

    def write_text(self, path: str, text: str) -> None:
        self.write(path, text.encode())

    def upload(self, local: str, path: str) -> None:
        """Copy a local file into the store, where others see it when it is complete.

        Args:
            local: Path of the local file.
            path: Path in the store.
        """
        self._put_complete(
            self.get_localized_path(path), lambda name: self.fs.put_file(local, name)
        )

    def _put_complete(self, target: str, put: Callable[[str], None]) -> None:
        """Have `put` write a file that nobody sees before it is complete."""
        folder, name = posixpath.split(target)
        atomic = self._put_is_atomic
        temporary = target if atomic else posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")
        try:
            if not atomic:  # object stores have no folders, and would turn a typo into a bucket
                self.fs.makedirs(folder, exist_ok=True)
            put(temporary)
            if not atomic:
                self._move(temporary, target)
        except Exception as error:  # clients of object stores have exceptions of their own
            if not atomic:
                with contextlib.suppress(Exception):
                    self.fs.rm_file(temporary)
            # Subclasses of OSError in other packages may not accept a number and a text.
            builtin = type(error).__module__ == "builtins"
            known = error if isinstance(error, OSError) and builtin else OSError()
            first = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            below = self.prefix_path + (" (a bucket must be there already)" if atomic else "")
            raise type(known)(
                known.errno or errno.EIO,
                f"cannot write {target}: {known.strerror or first}. "
                "Nothing is there under that name that was not there before; check the rights of "
                f"this user and the room below {below}, or choose another prefix",
            ) from error

    def _move(self, temporary: str, target: str) -> None:
        if "file" in _protocols(self.fs):
            os.replace(temporary, target)
            return
        previous = _previous(target)
        if self.fs.exists(target):  # HDFS does not rename onto a file
            if self.fs.exists(previous):
                self.fs.rm_file(previous)
            self.fs.mv(target, previous)
        self.fs.mv(temporary, target)
        if self.fs.exists(previous):
            self.fs.rm_file(previous)

    @property
    def _put_is_atomic(self) -> bool:
        return bool(_PUT_IS_ATOMIC & set(_protocols(self.fs)))

    def _names(self, path: str) -> list[str]:
        """Return the names under which a file may be: it has another one while it is replaced."""
        local = self.get_localized_path(path)
        if self._put_is_atomic or "file" in _protocols(self.fs):
            return [local]
        return [local, _previous(local), local]

    def remove(self, path: str) -> None:
        for name in dict.fromkeys(self._names(path)):
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm(name, recursive=True)

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
        from horovod.spark.common.reading.parquet_files import ParquetFiles

        return ParquetFiles(path, self.storage_options).dataset

    def get_train_data_path(self, idx: int | None = None) -> str:
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: int | None = None) -> str:
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def get_data_metadata_path(self, path: str) -> str:
        """Return where the facts about the data at a path are kept.

        Args:
            path: Folder of the data.
        """
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
        found.sort(key=lambda name: (_modified(self.fs, name), name))
        if "file" in _protocols(self.fs):
            return found
        # Without the protocol they would be taken for local files.
        run = self.get_run_path(run_id)
        return [posixpath.join(run, posixpath.relpath(name, folder)) for name in found]

    def get_logs_path(self, run_id: str) -> str | None:
        if not self._save_runs:
            return None
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir())

    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename or "checkpoint"

    def get_logs_subdir(self) -> str:
        return "logs"

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        return functools.partial(
            tempfile.TemporaryDirectory, prefix="horovod_run_", ignore_cleanup_errors=True
        )

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        return _Sync(self, self.get_run_path(run_id))

    def read_serialized_keras_model(
        self, ckpt_path: str, model: Any, custom_objects: dict[str, Any] | None = None
    ) -> str:
        """Read the Keras model of a checkpoint, as text that `KerasModel` understands.

        Args:
            ckpt_path: Path of the checkpoint.
            model: Model of the same structure, for checkpoints that hold weights only.
            custom_objects: Dict from names to the classes and functions that the model is made of.
                By default there are none.
        """
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


def _previous(target: str) -> str:
    folder, name = posixpath.split(target)
    return posixpath.join(folder, f".{name}.previous")


def _protocols(filesystem: Any) -> tuple[str, ...]:
    found = filesystem.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def _modified(filesystem: Any, path: str) -> float:
    try:
        return float(filesystem.modified(path).timestamp())
    except NotImplementedError:
        return 0.0
