"""HDFS through pyarrow's client, libhdfs: for `HDFSStore` and for the reader on every rank.

libhdfs starts a Java virtual machine in this process. pyarrow treats every failure to look at a
path as a missing path, so a training would begin anew while the NameNode is away: this module looks
at a missing path a second time.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import socket
from typing import Any

from fsspec.implementations.arrow import ArrowFSWrapper

_INSTALL = (
    "Hadoop must be installed on the driver's host and on those of all executors: set HADOOP_HOME, "
    "or ARROW_LIBHDFS_DIR to the folder of libhdfs.so, JAVA_HOME, and CLASSPATH to what "
    "`hadoop classpath --glob` prints"
)

_CHECK = "Check that it runs, and its host and port: fs.defaultFS in core-site.xml has them"
ANSWER_SECONDS = 30.0  # time for the NameNode to accept a connection


def connect(
    host: str = "default",
    port: int = 0,
    user: str | None = None,
    kerb_ticket: str | None = None,
    extra_conf: dict[str, str] | None = None,
) -> Any:
    """Return pyarrow's file system, once the NameNode has answered; else ConnectionError."""
    import pyarrow.fs as arrow

    name = "fs.defaultFS" if host == "default" else f"hdfs://{host}" + (f":{port}" if port else "")
    if not os.environ.get("CLASSPATH"):
        raise ConnectionError(f"cannot connect to {name}: CLASSPATH is not set. {_INSTALL}")
    if port and "://" not in host:
        _knock(name, host, port)
    _leave_signals_to_python()
    try:
        # With a replication of 0 the cluster's own setting holds; pyarrow's default is 3.
        filesystem = arrow.HadoopFileSystem(
            host, port, user=user, kerb_ticket=kerb_ticket, replication=0, extra_conf=extra_conf
        )
    except OSError as error:
        first = str(error).partition("\n")[0]  # the other lines list the paths it looked at
        raise ConnectionError(
            f"cannot connect to {name}: {first}. libhdfs may have printed the cause. Is that the "
            f"host's name? {_INSTALL}"
        ) from error
    try:
        with contextlib.suppress(PermissionError):  # which shows that the NameNode answers
            filesystem.get_file_info(arrow.FileSelector("/"))
    except OSError as error:
        raise ConnectionError(
            f"the NameNode of {name} does not answer: {error}. libhdfs has printed the cause. "
            f"{_CHECK}"
        ) from error
    return filesystem


def _knock(name: str, host: str, port: int) -> None:
    """Connect once, with a timeout: Hadoop itself tries for half an hour if packets are lost."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"the NameNode of {name} does not answer: {error}. {_CHECK}"
        ) from error


def look_at(filesystem: Any, path: str) -> Any:
    """Return pyarrow's facts about a path; OSError if HDFS did not tell whether it is there."""
    import pyarrow.fs as arrow

    found = nearest = filesystem.get_file_info(path)
    while nearest.type == arrow.FileType.NotFound and nearest.path not in ("", "/"):
        nearest = filesystem.get_file_info(posixpath.dirname(nearest.path))
    if found.type == arrow.FileType.NotFound and nearest.type != arrow.FileType.File:
        filesystem.get_file_info(arrow.FileSelector(nearest.path))  # fails if it was not an answer
    return found


def _leave_signals_to_python() -> None:
    """Keep Java from handling signals: it would end this process at once at Ctrl-C."""
    options = os.environ.get("LIBHDFS_OPTS", "")
    if "-Xrs" not in options.split():
        os.environ["LIBHDFS_OPTS"] = f"{options} -Xrs".strip()


class HadoopFiles(ArrowFSWrapper):
    """fsspec's view of HDFS; a path is missing only if the NameNode says that it is not there."""

    cachable = False

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._make_entry(look_at(self.fs, self._strip_protocol(path)))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.info(path)  # raises FileNotFoundError, while deleting only says that it failed
        super().rm(path, recursive, maxdepth)
