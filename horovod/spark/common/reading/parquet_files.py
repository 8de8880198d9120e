"""List the files of a Parquet dataset and their row groups, and read parts of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.spark.common.reading.columns import ColumnError
from horovod.spark.common.stores.filesystem import arrow_filesystem

READ_BYTES = 1024 * 1024  # bytes that a worker reads ahead, of all columns together
LEAST_READ_BYTES = 64 * 1024  # bytes that it reads ahead of each column at least

_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_LOOKED_AT = 16  # row groups to look at: thousands would take seconds


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of one row group."""

    file: int
    row_group: int
    start: int
    stop: int


class ParquetFiles:
    """The files of a dataset, with the numbers of rows in their row groups.

    Files and folders whose names begin with a dot or an underscore are not data. Each file's footer
    is read once, here. Only `dataset` needs pyarrow.dataset, which imports pandas: a rank saves
    these 40 MiB unless folders are named after partitions.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        import pyarrow.parquet as parquet

        self.url = url
        self.filesystem, self._path = arrow_filesystem(url, storage_options)
        self.paths = _data_files(self.filesystem, self._path)
        if not self.paths:
            raise FileNotFoundError(f"there is no Parquet data at {url}")
        self.metadata = [parquet.read_metadata(p, filesystem=self.filesystem) for p in self.paths]
        self.row_groups = [
            (index, group, metadata.row_group(group).num_rows)
            for index, metadata in enumerate(self.metadata)
            for group in range(metadata.num_row_groups)
        ]
        self.num_rows = sum(rows for _, _, rows in self.row_groups)

    @functools.cached_property
    def dataset(self) -> Any:
        """The same files as a `pyarrow.dataset.Dataset`."""
        import pyarrow.dataset as arrow_dataset

        return arrow_dataset.dataset(
            self._path, filesystem=self.filesystem, format="parquet", partitioning="hive"
        )

    @functools.cached_property
    def partitions(self) -> dict[str, dict[str, Any]]:
        """The columns that folders such as ``day=1`` stand for, by the files' paths."""
        if not any("=" in _relative(path, self._path) for path in self.paths):
            return {}
        import pyarrow.dataset as arrow_dataset

        return {
            fragment.path: arrow_dataset.get_partition_keys(fragment.partition_expression)
            for fragment in self.dataset.get_fragments()
        }

    @property
    def names(self) -> list[str]:
        """The names of all columns."""
        if self.partitions:
            return list(self.dataset.schema.names)
        return list(self.metadata[0].schema.to_arrow_schema().names)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise ColumnError if the data lacks one of these columns."""
        names = self.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise ColumnError(
                f"the data at {self.url} has no column {', '.join(map(repr, missing))}; "
                f"it has {', '.join(names)}"
            )

    @property
    def bytes_per_row(self) -> int:
        """The bytes of a decoded row, estimated from the first row groups.

        A column of few different numbers takes much less in the file than decoded.
        """
        size, rows = 0, 0
        for file, index, count in self.row_groups[:_LOOKED_AT]:
            group = self.metadata[file].row_group(index)
            for column in map(group.column, range(group.num_columns)):
                decoded = column.num_values * _VALUE_BYTES.get(column.physical_type, 0)
                size += max(decoded, column.total_uncompressed_size)
            rows += count
        return max(1, size // max(1, rows))

    def shard(self, index: int, count: int) -> list[Piece]:
        """Return the pieces that make up share `index` of `count`."""
        first, last = self.num_rows * index // count, self.num_rows * (index + 1) // count
        pieces, before = [], 0
        for file, group, rows in self.row_groups:
            start, stop = max(first - before, 0), min(last - before, rows)
            if start < stop:
                pieces.append(Piece(file, group, start, stop))
            before += rows
        return pieces

    def read(self, piece: Piece, columns: Sequence[str], chunk_rows: int) -> Iterator[Any]:
        """Yield the record batches of a piece; never more than a chunk is decoded at once."""
        import pyarrow as pa
        import pyarrow.fs as arrow_fs
        import pyarrow.parquet as parquet

        path = self.paths[piece.file]
        constants = self.partitions.get(path, {})
        stored = [name for name in columns if name not in constants]
        # A request to an object store takes long: there a row group is fetched at once.
        at_once = isinstance(self.filesystem, arrow_fs.PyFileSystem)
        with (
            self.filesystem.open_input_file(path) as source,
            parquet.ParquetFile(
                source,
                metadata=self.metadata[piece.file],
                buffer_size=max(LEAST_READ_BYTES, READ_BYTES // max(1, len(stored))),
                pre_buffer=at_once,
            ) as file,
        ):
            position = 0
            for batch in file.iter_batches(
                chunk_rows, row_groups=[piece.row_group], columns=stored, use_threads=False
            ):
                start = max(piece.start - position, 0)
                stop = min(piece.stop - position, batch.num_rows)
                position += batch.num_rows
                if start < stop:
                    chosen = batch.slice(start, stop - start)
                    for name in columns:
                        if name in constants:
                            kind = self.dataset.schema.field(name).type
                            if pa.types.is_dictionary(kind):
                                kind = kind.value_type
                            values = pa.repeat(pa.scalar(constants[name], kind), chosen.num_rows)
                            chosen = chosen.append_column(name, values)
                    yield chosen
                if position >= piece.stop:
                    return


def _data_files(filesystem: Any, path: str) -> list[str]:
    """Return the paths of all files with data at a path, sorted."""
    import pyarrow.fs as arrow_fs

    found = filesystem.get_file_info(path)
    if found.type == arrow_fs.FileType.File:
        return [found.path]
    if found.type != arrow_fs.FileType.Directory:
        return []
    files = filesystem.get_file_info(arrow_fs.FileSelector(path, recursive=True))
    return sorted(
        file.path
        for file in files
        if file.is_file
        and not any(part.startswith((".", "_")) for part in _relative(file.path, path).split("/"))
    )


def _relative(path: str, folder: str) -> str:
    """Return a path as seen from a folder, whether or not both begin with a slash."""
    return path.strip("/")[len(folder.strip("/")) :]
