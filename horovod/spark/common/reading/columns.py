"""Convert Arrow columns to numpy arrays with one row shape, for the reader and for `transform`.

Numbers and booleans become one value per row, arrays (nested ones too) a block per row, and Spark
ML vectors, dense and sparse, become dense rows. Every row of a column must have the same shape and
no value may be null, because a model could not take such rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

Rows = dict[str, "np.ndarray[Any, Any]"]

_VECTOR_FIELDS = {"type", "size", "indices", "values"}


class ColumnError(ValueError):
    """A column holds something that no model can be fed with."""


def is_vector_type(kind: Any) -> bool:
    """Return whether Spark stores ML vectors as this Arrow type."""
    return bool(
        pa.types.is_struct(kind)
        and {kind.field(i).name for i in range(kind.num_fields)} == _VECTOR_FIELDS
    )


def rows_of(batch: Any) -> Rows:
    """Return the columns of a record batch or table as arrays."""
    return {name: to_numpy(name, batch.column(name)) for name in batch.schema.names}


def to_numpy(name: str, column: Any) -> np.ndarray[Any, Any]:
    """Return an Arrow column as an array whose first dimension is the rows."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # more than one chunk is left for huge columns
            return np.concatenate([to_numpy(name, chunk) for chunk in column.chunks])
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if column.null_count:
        raise ColumnError(
            f"column {name!r} has {column.null_count} null value(s): fill them or drop the rows "
            "(df.na.fill, df.na.drop) before training"
        )
    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_integer(kind):
        return _numbers(column)
    if pa.types.is_boolean(kind):
        return _numbers(column.cast(pa.uint8())).view(np.bool_)
    if pa.types.is_decimal(kind):
        return _numbers(column.cast(pa.float64()))
    if pa.types.is_fixed_size_list(kind):
        return _list_rows(name, column.flatten(), kind.list_size, len(column))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_rows(name, column.flatten(), _only_length(name, column), len(column))
    if is_vector_type(kind):
        return _dense_vectors(name, column)
    raise ColumnError(
        f"column {name!r} is of type {kind}, which a model cannot be fed with: "
        "make numbers of it in the DataFrame, or in transformation_fn"
    )


def _numbers(column: Any) -> np.ndarray[Any, Any]:
    """Return numbers without nulls as a read-only array that shares Arrow's memory.

    Arrow's own `to_numpy` does the same but imports pandas, which takes 40 MiB.
    """
    dtype = np.dtype(column.type.to_pandas_dtype())
    if not len(column):
        return np.empty(0, dtype)
    start = column.offset * dtype.itemsize
    return np.frombuffer(column.buffers()[1], dtype, len(column), start)


def check_nan(name: str, array: np.ndarray[Any, Any]) -> None:
    """Raise ColumnError if rows have NaN."""
    if array.dtype.kind != "f":
        return
    has_nan = np.isnan(array).reshape(len(array), -1).any(axis=1)
    if has_nan.any():
        raise ColumnError(
            f"column {name!r} has NaN in {has_nan.sum()} of the {len(array)} rows that were read "
            "first, which would make the loss NaN: leave such rows out of the data, or set "
            "nan_labels='keep' if the loss leaves them out"
        )


def _list_rows(name: str, values: Any, length: int, rows: int) -> np.ndarray[Any, Any]:
    inner = to_numpy(name, values)
    return inner.reshape(rows, length, *inner.shape[1:])


def _only_length(name: str, column: Any) -> int:
    """Return the length that all rows of a list column have; ColumnError if they differ."""
    if len(column) == 0:
        return 0
    lengths = np.diff(_numbers(column.offsets))
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest != longest:
        raise ColumnError(
            f"column {name!r} has rows of {shortest} and of {longest} elements: "
            "all rows must have the same shape, so pad them or cut them first"
        )
    return longest


def _dense_vectors(name: str, column: Any) -> np.ndarray[Any, Any]:
    """Make dense rows of Spark's structs (type 1: values; type 0: size, indices and values)."""
    rows = len(column)
    dense = column.field("type").to_numpy(zero_copy_only=False) == 1
    values, counts = _flat(column.field("values"))
    indices, _ = _flat(column.field("indices"))
    sizes = np.where(
        dense, counts, column.field("size").fill_null(0).to_numpy(zero_copy_only=False)
    )
    if rows == 0:
        return np.zeros((0, 0))
    if sizes.min() != sizes.max():
        raise ColumnError(
            f"column {name!r} has vectors of {sizes.min()} and of {sizes.max()} elements: "
            "all rows must have the same size"
        )
    width = int(sizes[0])
    result = np.zeros((rows, width))
    row_of_value = np.repeat(np.arange(rows), counts)
    is_dense = dense[row_of_value]
    result[dense] = values[is_dense].reshape(-1, width)
    result[row_of_value[~is_dense], indices] = values[~is_dense]
    return result


def _flat(lists: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return all values of a list column one after the other, and how many each row has."""
    counts = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return np.asarray(lists.flatten().to_numpy(zero_copy_only=False)), counts
