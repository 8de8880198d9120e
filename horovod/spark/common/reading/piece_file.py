"""Keep decoded rows on the local disk, so that a rank decodes Parquet in its first pass only.

Reading decoded rows back takes a twentieth of the processor time of decoding lists, and the system
keeps them in memory that is free anyway. The file has no name, so nothing is left of it when the
process ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from horovod.spark.common.reading.columns import Rows
from horovod.spark.common.reading.parquet_files import Piece
from horovod.spark.common.reading.row_buffer import RowLayout, row_count

FREE_SHARE = 0.1  # share of the disk that the file leaves free

_Chunk = tuple[int, int]  # its position in the file, and its number of rows


def local_folder(index: int) -> str:
    """Return where Spark lets an executor keep temporary data; `index` chooses among disks."""
    given = os.environ.get("SPARK_LOCAL_DIRS") or os.environ.get("LOCAL_DIRS") or ""
    folders = [folder for folder in given.split(",") if os.path.isdir(folder)]
    return folders[index % len(folders)] if folders else tempfile.gettempdir()


class PieceFile:
    """The rows of pieces that have been decoded once. All methods may be called by any thread.

    Pieces are kept while a tenth of the disk stays free, and decoded in every pass otherwise.

    Args:
        folder: Where the file is made. No row is kept there if it is in memory (tmpfs), or cannot
            be written to.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stored: dict[Piece, list[_Chunk]] = {}
        self._writing: set[Piece] = set()
        self._layout: RowLayout | None = None
        self._end = 0
        self._file: Any = None
        with contextlib.suppress(OSError):
            if not _is_in_memory(folder):
                self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._is_full = self._file is None

    def chunks(self, piece: Piece, decode: Callable[[Piece], Iterator[Rows]]) -> Iterator[Rows]:
        """Yield the rows of a piece: from the file, or decoded and then kept in the file."""
        with self._lock:
            stored = self._stored.get(piece)
            is_new = stored is None and not self._is_full and piece not in self._writing
            if is_new:
                self._writing.add(piece)
        if stored is not None:
            yield from map(self._read, stored)
        elif is_new:
            yield from self._store(piece, decode(piece))
        else:
            yield from decode(piece)

    def _store(self, piece: Piece, decoded: Iterator[Rows]) -> Iterator[Rows]:
        """Pass decoded chunks on, and write them; the piece is stored if all could be written."""
        written: list[_Chunk] = []
        try:
            for rows in decoded:
                if not self._is_full:
                    self._write(rows, written)
                yield rows
                del rows  # frees their memory before more rows are decoded
            if not self._is_full:
                self._stored[piece] = written
        finally:
            self._writing.discard(piece)

    def _write(self, rows: Rows, written: list[_Chunk]) -> None:
        """Append a chunk to the file; after the first one that does not fit, write nothing more."""
        with self._lock:
            self._layout = self._layout or RowLayout(rows)
            offset, count = self._end, row_count(rows)
            self._end += count * self._layout.row_bytes
        try:
            usage = shutil.disk_usage(self._folder)
            if usage.free - count * self._layout.row_bytes < FREE_SHARE * usage.total:
                raise OSError
            position = offset
            for array in self._layout.pack(rows):
                left = np.ascontiguousarray(array).data.cast("B")
                while left:
                    done = os.pwrite(self._file.fileno(), left, position)
                    position, left = position + done, left[done:]
            written.append((offset, count))
        except OSError:
            self._is_full = True

    def _read(self, chunk: _Chunk) -> Rows:
        assert self._layout is not None
        position, count = chunk
        arrays = self._layout.empty(count)
        for array in arrays:
            left = array.data.cast("B")
            while left:
                done = os.preadv(self._file.fileno(), [left], position)
                if not done:
                    raise OSError(f"a temporary file in {self._folder} has lost its rows")
                position, left = position + done, left[done:]
            array.flags.writeable = False  # it does not change any more, so nobody has to copy it
        return self._layout.columns(arrays)


def _is_in_memory(folder: str) -> bool:
    """Return whether what is written to a folder stays in memory, as on tmpfs."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        lines = [line.split() for line in mounts]
    return any(
        fields[2] == number and fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
        for fields in lines
    )
