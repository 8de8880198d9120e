"""The interface of stores, which estimators and ranks use."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from horovod.spark.common.remote_store import RemoteStore


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
        from horovod.spark.common.store import store_class

        prefix_path = os.fspath(prefix_path)
        return store_class(prefix_path)(prefix_path, *args, **kwargs)
