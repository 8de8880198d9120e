"""Decoded rows on the local disk: read back as they were, and only where there is room for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod.spark.common.reading import piece_file
from horovod.spark.common.reading.columns import ColumnError, Rows
from horovod.spark.common.reading.parquet_files import Piece
from horovod.spark.common.reading.piece_file import PieceFile, local_folder
from horovod.spark.common.reading.reader import ParquetReader
from tests.spark.parquet import write

PIECES = [Piece(0, 0, 0, 5000), Piece(0, 1, 0, 7)]


class Decoder:
    """Makes the chunks of a piece, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, piece: Piece) -> Iterator[Rows]:
        self.calls += 1
        for start in range(piece.start, piece.stop, 2000):
            numbers = np.arange(start, min(start + 2000, piece.stop))
            yield {
                "i": numbers,
                "x": np.stack([numbers, -numbers], axis=1).astype(np.float32),
                "j": numbers + piece.row_group,
                "even": numbers % 2 == 0,
            }


def rows_of(chunks: Iterator[Rows]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, array in chunk.items():
            found.setdefault(name, []).extend(array.tolist())
    return found


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is on the disk of the machine that tests run on."""
    monkeypatch.setattr(piece_file, "FREE_SHARE", 0.0)


def test_a_piece_is_decoded_once(tmp_path: Path):
    kept, decode = PieceFile(str(tmp_path)), Decoder()
    expected = [rows_of(Decoder()(piece)) for piece in PIECES]
    for _ in range(3):
        assert [rows_of(kept.chunks(piece, decode)) for piece in PIECES] == expected
    assert decode.calls == len(PIECES)
    assert not list(tmp_path.iterdir()), "the file has no name that could be left"


def test_a_piece_that_was_left_early_or_is_being_decoded_is_decoded_again(tmp_path: Path):
    kept, decode = PieceFile(str(tmp_path)), Decoder()
    expected = rows_of(Decoder()(PIECES[0]))
    first = kept.chunks(PIECES[0], decode)
    next(first)
    assert rows_of(kept.chunks(PIECES[0], decode)) == expected, "by another thread meanwhile"
    first.close()
    for _ in range(2):
        assert rows_of(kept.chunks(PIECES[0], decode)) == expected
    assert decode.calls == 3


def test_nothing_is_kept_where_there_is_no_room(tmp_path: Path, monkeypatch: Any):
    decode = Decoder()
    monkeypatch.setattr(piece_file, "FREE_SHARE", 1.0)
    for folder in (tmp_path, tmp_path / "missing", Path("/dev/shm")):  # the last is memory
        kept = PieceFile(str(folder))
        for _ in range(2):
            assert rows_of(kept.chunks(PIECES[0], decode)) == rows_of(Decoder()(PIECES[0]))
        if folder == tmp_path:
            monkeypatch.undo()
    assert decode.calls == 6


def test_pieces_of_different_kinds_are_an_error(tmp_path: Path):
    kept = PieceFile(str(tmp_path))
    list(kept.chunks(PIECES[0], lambda _: iter([{"x": np.zeros((3, 2))}])))
    with pytest.raises(ColumnError, match="all rows must be alike"):
        list(kept.chunks(PIECES[1], lambda _: iter([{"x": np.zeros((3, 4))}])))


def test_the_folder_is_one_of_sparks(tmp_path: Path, monkeypatch: Any):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        Path(folder).mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", ",".join([*folders, str(tmp_path / "missing")]))
    assert [local_folder(index) for index in range(3)] == [*folders, folders[0]]
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    monkeypatch.delenv("LOCAL_DIRS", raising=False)
    assert Path(local_folder(0)).is_dir()


@pytest.mark.parametrize("shuffle", [True, False])
def test_later_passes_do_not_need_the_data(tmp_path: Path, monkeypatch: Any, shuffle: bool):
    """Rows, and their order, are those of a reader that decodes them in every pass."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    numbers = np.arange(100)
    columns = {"i": numbers, "x": pa.array([[float(n), -float(n)] for n in numbers])}
    data = write(tmp_path / "data", columns)

    def passes(cached: bool) -> Iterator[dict[str, list[Any]]]:
        with ParquetReader(
            str(data), shuffle_row_groups=shuffle, seed=3, num_epochs=3, disk_cache=cached
        ) as reader:
            yield from map(rows_of, reader.passes())

    expected = list(passes(cached=False))
    found = passes(cached=True)
    assert next(found) == expected[0]
    assert next(found) == expected[1]
    shutil.rmtree(data)
    assert next(found) == expected[2]


def test_rows_are_made_anew_by_a_transformation(tmp_path: Path):
    """It may be random: what it made in one pass is not what it makes in the next."""
    data, calls = write(tmp_path / "data", {"i": np.arange(10)}, files=1, row_group=10), []

    def count(frame: Any) -> Any:
        calls.append(len(frame))
        return frame

    with ParquetReader(str(data), num_epochs=2, transform_fn=count, disk_cache=True) as reader:
        assert sum(len(rows["i"]) for rows in reader) == 20
    assert calls == [10, 10]
