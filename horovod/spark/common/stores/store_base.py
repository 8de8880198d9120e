"""The interface of stores, which estimators and ranks use."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class RemoteStore:
    """A store as ranks see it: the paths of one run, and functions that copy files to it.

    Rank 0 uses `get_local_output_dir` and `sync`.
    """

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], Any]
    sync: Callable[[str], None]
    storage_options: dict[str, Any] | None = None


class Store(ABC):
    """Base class of the stores in which estimators keep data, checkpoints and logs.

    `Store.create` chooses a class by the form of the path. Subclass it to keep files elsewhere.
    """

    storage_options: dict[str, Any] | None = None  # what fsspec needs to open the paths
    _find_class: ClassVar[Callable[[str], Callable[..., Store]]]  # `store` sets it

    @abstractmethod
    def is_parquet_dataset(self, path: str) -> bool:
        """Say whether there is complete Parquet data at a path.

        Args:
            path: Path in the store.
        """

    @abstractmethod
    def get_parquet_dataset(self, path: str) -> Any:
        """Open the Parquet data at a path, as a `pyarrow.dataset.Dataset`.

        Args:
            path: Path in the store.
        """

    @abstractmethod
    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the training data.

        Args:
            idx: Number of the data set. By default the path without a number.
        """

    @abstractmethod
    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the validation data.

        Args:
            idx: Number of the data set. By default the path without a number.
        """

    @abstractmethod
    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the test data.

        Args:
            idx: Number of the data set. By default the path without a number.
        """

    @abstractmethod
    def saving_runs(self) -> bool:
        """Say whether checkpoints and logs are kept."""

    @abstractmethod
    def get_runs_path(self) -> str:
        """Return the folder of all runs."""

    @abstractmethod
    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run.

        Args:
            run_id: Name of the run.
        """

    @abstractmethod
    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the path of a run's checkpoint; None if none is kept.

        Args:
            run_id: Name of the run.
        """

    @abstractmethod
    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """List the checkpoint files of a run, the oldest first.

        Args:
            run_id: Name of the run.
            suffix: End of their names. The default is `.ckpt`.
        """

    @abstractmethod
    def get_logs_path(self, run_id: str) -> str | None:
        """Return the folder of a run's logs; None if none are kept.

        Args:
            run_id: Name of the run.
        """

    @abstractmethod
    def get_checkpoint_filename(self) -> str:
        """Return the file name of checkpoints."""

    @abstractmethod
    def get_logs_subdir(self) -> str:
        """Return the name of the folder of logs inside of a run."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Say whether there is a file or folder at a path.

        Args:
            path: Path in the store.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the bytes of a file.

        Args:
            path: Path in the store.
        """

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file, which others see when it is complete.

        Args:
            path: Path in the store.
            data: Bytes to write.
        """

    @abstractmethod
    def write_text(self, path: str, text: str) -> None:
        """Write a text file, which others see when it is complete.

        Args:
            path: Path in the store.
            text: Text to write.
        """

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete a file or a folder, if it is there.

        Args:
            path: Path in the store.
        """

    @abstractmethod
    def check_writable(self) -> None:
        """Raise an OSError if this process cannot write to the store."""

    @abstractmethod
    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        """Return a function that makes the local folder a rank writes into.

        The function returns a context manager, which removes the folder in the end.

        Args:
            run_id: Name of the run.
        """

    @abstractmethod
    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies what is new in a local folder to the run's path.

        Args:
            run_id: Name of the run.
        """

    def to_remote(self, run_id: str, dataset_idx: int | None) -> RemoteStore:
        """Return what the ranks need to know of this store.

        Args:
            run_id: Name of the run.
            dataset_idx: Number of the data set. None means the paths without a number.
        """
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
        """Make the store for a path: HDFS, DBFS on Databricks, or whatever fsspec opens.

        Args:
            prefix_path: Folder or URL under which everything is kept. All hosts must see it.
            *args: Further arguments of the store's class.
            **kwargs: The same by name, such as `train_path`, `runs_path`, `save_runs` and
                `storage_options`.

        Returns:
            A `FilesystemStore`, `HDFSStore` or `DBFSLocalStore`.

        Examples:
            >>> store = Store.create("s3://bucket/training", storage_options={"anon": False})
        """
        prefix_path = os.fspath(prefix_path)
        return Store._find_class(prefix_path)(prefix_path, *args, **kwargs)
