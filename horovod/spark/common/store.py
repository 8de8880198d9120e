"""The stores of `Store.create`, in which estimators keep data, checkpoints and logs."""

from __future__ import annotations

import os
import warnings
from typing import Any

from horovod.spark.common.stores.filesystem import split_hdfs, split_url
from horovod.spark.common.stores.filesystem_store import AbstractFilesystemStore
from horovod.spark.common.stores.store_base import Store

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "Store",
]


def is_databricks() -> bool:
    """Return whether this is the Databricks runtime."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def store_class(prefix_path: str) -> type[AbstractFilesystemStore]:
    """Return the class of the store for a path: HDFS, DBFS on Databricks, or fsspec for others."""
    if HDFSStore.matches(prefix_path):
        return HDFSStore
    if is_databricks() and DBFSLocalStore.matches_dbfs(prefix_path):
        return DBFSLocalStore
    return FilesystemStore


class FilesystemStore(AbstractFilesystemStore):
    """A store on anything that fsspec opens: local files, s3, gs, abfs and many more.

    Args:
        prefix_path: Folder or URL under which everything is kept.
        *args: Further arguments of `AbstractFilesystemStore`, from `train_path` on.
        **kwargs: The same by name: `train_path`, `val_path`, `test_path`, `runs_path`, `save_runs`,
            `storage_options`, `checkpoint_filename`.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(os.fspath(prefix_path), *args, **kwargs)

    def get_full_path(self, path: str) -> str:
        return path if "://" in path else "file://" + os.path.abspath(split_url(path)[1])

    def get_localized_path(self, path: str) -> str:
        return str(self.fs._strip_protocol(self.get_full_path(path)))

    def _open_filesystem(self) -> Any:
        import fsspec

        return fsspec.core.url_to_fs(self.prefix_path, **(self.storage_options or {}))[0]

    def copy(self, lpath: str, rpath: str, recursive: bool = False, **kwargs: Any) -> None:
        """Copy a local file or folder into the store.

        Args:
            lpath: Local path.
            rpath: Path in the store.
            recursive: Whether to copy a folder with all that is in it. The default is False.
            **kwargs: Further arguments of fsspec's `put`.
        """
        self.fs.put(lpath, self.get_localized_path(rpath), recursive=recursive, **kwargs)


class LocalStore(FilesystemStore):
    """Deprecated name of `FilesystemStore`.

    Args:
        prefix_path: Folder or URL under which everything is kept.
        *args: Further arguments of `AbstractFilesystemStore`, from `train_path` on.
        **kwargs: The same by name: `train_path`, `val_path`, `test_path`, `runs_path`, `save_runs`,
            `storage_options`, `checkpoint_filename`.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "LocalStore is deprecated: use FilesystemStore, or Store.create",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(prefix_path, *args, **kwargs)


class HDFSStore(AbstractFilesystemStore):
    """A store on HDFS, through pyarrow's client.

    The client is libhdfs, which needs Java and Hadoop on every host.

    Args:
        prefix_path: Path such as `hdfs://host:port/path` or `hdfs:///path`.
        host: Host of the NameNode. By default that of the path, or the one that Hadoop's
            configuration names.
        port: Port of the NameNode. By default that of the path, or of the configuration.
        user: User on HDFS. By default the one that runs the program.
        kerb_ticket: File with a Kerberos ticket. By default the one that Kerberos finds.
        driver: `libhdfs`, the only one that there is.
        extra_conf: Dict of further settings of Hadoop. By default there are none.
        *args: Further arguments of `AbstractFilesystemStore`, from `train_path` on.
        **kwargs: The same by name: `train_path`, `val_path`, `test_path`, `runs_path`, `save_runs`,
            `storage_options`, `checkpoint_filename`.

    Raises:
        ValueError: `driver` is another one, or the path is empty.
    """

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
        """Say whether a path is one of HDFS.

        Args:
            path: Path or URL.
        """
        return path.startswith(cls.FS_PREFIX)

    def get_full_path(self, path: str) -> str:
        return self._url_prefix + split_hdfs(path)[2]

    def get_localized_path(self, path: str) -> str:
        return split_hdfs(path)[2]

    def _open_filesystem(self) -> Any:
        from horovod.spark.common.stores.hdfs import HadoopFiles, connect

        return HadoopFiles(
            connect(self._host, self._port, self._user, self._kerb_ticket, self._extra_conf)
        )


class DBFSLocalStore(FilesystemStore):
    """A store on the Databricks file system, as every host has it mounted below /dbfs.

    Args:
        prefix_path: Path that begins with `/dbfs/`, `dbfs:/`, `file:/dbfs/` or `file:///dbfs/`.
        *args: Further arguments of `AbstractFilesystemStore`, from `train_path` on.
        **kwargs: The same by name: `train_path`, `val_path`, `test_path`, `runs_path`, `save_runs`,
            `storage_options`, `checkpoint_filename`.

    Raises:
        ValueError: The path is none of these.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **kwargs)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Say whether a path is one of the Databricks file system.

        Args:
            path: Path or URL.
        """
        return path.startswith(("/dbfs/", "dbfs:/", "file:/dbfs/", "file:///dbfs/")) and (
            not path.startswith("dbfs://")
        )

    @staticmethod
    def normalize_path(path: str) -> str:
        """Return the path below /dbfs at which a path of DBFS is mounted.

        Args:
            path: Path of DBFS in any of its forms.
        """
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
        """Return the file name of checkpoints, by default `checkpoint.tf`."""
        return self._checkpoint_filename or "checkpoint.tf"


Store._find_class = staticmethod(store_class)
