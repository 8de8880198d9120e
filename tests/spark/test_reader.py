"""Reading Parquet on ranks: shares, order, shuffling, columns, bounded memory, errors."""

from __future__ import annotations

import collections
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.spark.common.reading.batches import batches, in_memory, read_all
from horovod.spark.common.reading.columns import ColumnError, to_numpy
from horovod.spark.common.reading.reader import ParquetReader
from tests.effort import examples
from tests.spark.parquet import write


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 rows in 3 files with row groups of 7, numbered in `i`; `f` and `g` are floats."""
    numbers = np.arange(100)
    columns = {"i": numbers, "f": numbers * 0.5, "g": numbers * 2.0, "s": numbers.astype(str)}
    return write(tmp_path_factory.mktemp("numbered") / "data", columns)


def rows_of(reader: ParquetReader) -> list[int]:
    with reader:
        return [int(i) for chunk in reader for i in chunk["i"]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 100])
def test_shares_are_even_and_together_everything(numbered: Path, ranks: int):
    shares = [
        rows_of(ParquetReader(str(numbered), schema_fields=["i"], cur_shard=r, shard_count=ranks))
        for r in range(ranks)
    ]
    assert [row for share in shares for row in share] == list(range(100))
    assert {len(share) for share in shares} <= {100 // ranks, -(-100 // ranks)}


def test_more_ranks_than_rows_is_an_error(numbered: Path):
    with pytest.raises(ValueError, match=r"100 row\(s\) for 101 ranks"):
        ParquetReader(str(numbered), shard_count=101)


def test_the_order_is_the_same_whatever_the_number_of_workers(numbered: Path):
    def order(workers: int, seed: int) -> list[int]:
        return rows_of(
            ParquetReader(
                str(numbered),
                schema_fields=["i"],
                shuffle_row_groups=True,
                seed=seed,
                workers_count=workers,
                num_epochs=2,
            )
        )

    assert order(1, 5) == order(3, 5) != order(3, 6)
    found = order(2, 5)
    assert found[:100] != found[100:], "each pass has its own order"
    assert sorted(found[:100]) == sorted(found[100:]) == list(range(100))


def test_a_pass_that_is_left_early_begins_again(numbered: Path):
    with ParquetReader(str(numbered), schema_fields=["i"], workers_count=1) as reader:
        assert next(iter(reader))["i"][0] == 0
        assert next(iter(reader))["i"][0] == 0
        assert not reader.last_row_consumed
        list(reader)
        assert reader.last_row_consumed
    names = [thread.name for thread in threading.enumerate()]
    assert "horovod-reader" not in names


@pytest.mark.parametrize("epochs", [1, 3])
def test_workers_read_the_passes_asked_for_and_no_more(numbered: Path, epochs: int):
    read = []

    def count(frame: Any) -> Any:
        read.extend(frame["i"])
        return frame

    reader = ParquetReader(
        str(numbered), schema_fields=["i"], num_epochs=epochs, transform_fn=count
    )
    for turn in (1, 2):  # it begins again
        assert [int(i) for rows in reader for i in rows["i"]] == list(range(100)) * epochs
        assert sorted(read) == sorted(list(range(100)) * epochs * turn)
        assert "horovod-reader" not in [thread.name for thread in threading.enumerate()]


def test_iterating_again_goes_on_with_the_next_order(numbered: Path):
    def reader(epochs: int) -> ParquetReader:
        return ParquetReader(
            str(numbered),
            schema_fields=["i"],
            shuffle_row_groups=True,
            seed=4,
            num_epochs=epochs,
        )

    again = reader(1)
    assert rows_of(again) + rows_of(again) == rows_of(reader(2))
    with reader(2) as partly:
        first = [int(i) for rows in next(partly.passes()) for i in rows["i"]]
        rest = rows_of(partly)  # one pass of the run that is there, and one of another
    assert first + rest == rows_of(reader(3))


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda s: sum(s) > 0),
    passes=st.integers(1, 3),
    batch=st.integers(1, 12),
    capacity=st.integers(0, 30),
)
def test_every_pass_gives_every_row_once(sizes: Any, passes: int, batch: int, capacity: int):
    edges = np.cumsum([0, *sizes])
    total = int(edges[-1])
    capacity = min(capacity, total)

    def chunks() -> Any:
        for start, stop in itertools.pairwise(edges):
            numbers = np.arange(start, stop)
            yield {"i": numbers, "j": numbers * 2, "v": np.stack([numbers, -numbers], 1) * 1.0}

    found = list(batches((chunks() for _ in range(passes)), batch, capacity=capacity, seed=3))
    lengths = [len(each["i"]) for each in found]
    assert all(length == batch for length in lengths[:-1])
    assert 0 < lengths[-1] <= batch
    rows = {name: np.concatenate([each[name] for each in found]) for name in "ijv"}
    assert (rows["j"] == rows["i"] * 2).all()
    assert (rows["v"] == np.stack([rows["i"], -rows["i"]], 1)).all()
    for start in range(passes):
        share = rows["i"][start * total : (start + 1) * total]
        assert sorted(share) == list(range(total))
    if capacity == 0:
        assert list(rows["i"]) == list(range(total)) * passes


def test_rows_are_mixed_across_the_buffer():
    chunks = [{"i": np.arange(n, n + 100)} for n in range(0, 4000, 100)]
    found = np.concatenate([b["i"] for b in batches([iter(chunks)], 50, capacity=1000, seed=1)])
    distance = np.abs(found - np.arange(4000))
    assert distance.mean() > 250, "rows move far, on average"
    assert (found - np.arange(4000)).max() <= 1000 + 1024 + 100, "but not farther than the buffer"


def test_all_rows_in_memory_come_once_in_each_pass():
    rows = {"i": np.arange(10)}
    found = itertools.islice(in_memory(rows, 4, shuffle=True, seed=0), 10)
    numbers = np.concatenate([batch["i"] for batch in found])
    assert [sorted(part) for part in numbers.reshape(4, 10)] == [list(range(10))] * 4
    assert read_all([{"i": np.arange(0)}, rows])["i"].tolist() == list(range(10))


# -- columns --------------------------------------------------------------------------------------


def vectors(rows: list[Any]) -> pa.Array:
    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    return pa.array(rows, kind)


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, **values: float) -> dict[str, Any]:
    indices = [int(name[1:]) for name in values]
    return {"type": 0, "size": size, "indices": indices, "values": list(values.values())}


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, 2], pa.int16()), [1, 2]),
        (pa.array([True, False]), [1, 0]),
        (pa.array([1.5, 2.5], pa.float32()), [1.5, 2.5]),
        (pa.array(["1.25", "2.50"]).cast(pa.decimal128(5, 2)), [1.25, 2.5]),
        (pa.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [3, 4]]),
        (pa.array([[[1.0], [2.0]], [[3.0], [4.0]]]), [[[1], [2]], [[3], [4]]]),
        (pa.array([[0, 0], [1, 2], [3, 4]]).slice(1), [[1, 2], [3, 4]]),
        (pa.chunked_array([[1, 2], [3]]), [1, 2, 3]),
        (vectors([dense(1, 2, 3), sparse(3, _1=5.0)]), [[1, 2, 3], [0, 5, 0]]),
        (vectors([sparse(2), sparse(2, _0=1.0, _1=2.0)]), [[0, 0], [1, 2]]),
        (vectors([dense(0, 0), dense(1, 2), sparse(2, _1=7.0)]).slice(1), [[1, 2], [0, 7]]),
    ],
)
def test_columns_become_arrays(column: Any, expected: Any):
    found = to_numpy("c", column)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None]), r"'c' has 1 null value\(s\)"),
        (pa.array([[1, None], [3, 4]]), r"'c' has 1 null value\(s\)"),
        (pa.array([[1], [3, 4]]), "rows of 1 and of 2 elements"),
        (vectors([dense(1), sparse(2)]), "vectors of 1 and of 2 elements"),
        (pa.array(["a"]), "transformation_fn"),
    ],
)
def test_columns_that_no_model_can_be_fed_with(column: Any, message: str):
    with pytest.raises(ColumnError, match=message):
        to_numpy("c", column)


def test_a_missing_column_is_named(numbered: Path):
    with pytest.raises(ColumnError, match="no column 'nope'; it has i, f, g, s"):
        ParquetReader(str(numbered), schema_fields=["i", "nope"])


def test_no_data(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no Parquet data"):
        ParquetReader(str(tmp_path / "nowhere"))


def test_text_goes_through_transformation_fn(numbered: Path):
    def double(frame: Any) -> Any:
        frame["t"] = frame["s"].astype(int) * 2
        frame["pair"] = [np.array([i, i + 1]) for i in frame["i"]]
        return frame

    with (
        pytest.raises(ColumnError, match="column 's' is of type"),
        ParquetReader(str(numbered)) as reader,
    ):
        list(reader)
    with ParquetReader(str(numbered), transform_fn=double, removed_fields=["s"]) as reader:
        rows = read_all(reader)
    assert set(rows) == {"i", "f", "g", "t", "pair"}
    assert (rows["t"] == rows["i"] * 2).all()
    assert (rows["pair"] == np.stack([rows["i"], rows["i"] + 1], 1)).all()


def test_what_transformation_fn_raises_is_raised(numbered: Path):
    def broken(frame: Any) -> Any:
        raise KeyError("nothing here")

    with (
        ParquetReader(str(numbered), transform_fn=broken) as reader,
        pytest.raises(KeyError, match="nothing here"),
    ):
        list(reader)


def test_files_that_differ_are_an_error(tmp_path: Path):
    write(tmp_path / "a", {"v": [[1.0, 2.0]] * 8}, files=1)
    write(tmp_path / "b", {"v": [[1.0, 2.0, 3.0]] * 8}, files=1)
    (tmp_path / "b" / "part-00000.parquet").rename(tmp_path / "a" / "part-00001.parquet")
    with (
        ParquetReader(str(tmp_path / "a")) as reader,
        pytest.raises(ColumnError, match=r"'v' has rows of shape \(2,\)"),
    ):
        list(batches(reader.passes(), 4))


def test_partition_columns_of_directories_are_read(tmp_path: Path):
    for day in (1, 2):
        write(tmp_path / "data" / f"day={day}", {"i": np.arange(5) + day * 10}, files=1)
    with ParquetReader(str(tmp_path / "data"), schema_fields=["day", "i"]) as reader:
        rows = read_all(reader)
    assert collections.Counter(rows["day"].tolist()) == {1: 5, 2: 5}
    assert (rows["i"] // 10 == rows["day"]).all()


def test_any_file_system_of_fsspec(numbered: Path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(numbered), "/numbered", recursive=True)
    assert rows_of(ParquetReader("memory://numbered", schema_fields=["i"])) == list(range(100))
    memory.rm("/numbered", recursive=True)
