"""Find the types and shapes of columns, from Spark's schema, first rows, and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.spark.common.reading.columns import ColumnError, Rows, to_numpy

Metadata = dict[str, dict[str, Any]]

NOCHANGE, ARRAY, CUSTOM_SPARSE = "nochange", "array", "custom_sparse_format"


def describe(frame: Any, columns: list[str], compress_sparse: bool) -> Metadata:
    """Return types and shapes of the columns of a DataFrame that was written to Parquet.

    One query over the Parquet finds nulls, NaN, and rows whose lengths differ.
    """
    import pyspark.sql.functions as F

    kinds = {field.name: field.dataType for field in frame.schema.fields}
    queries = {name: _Queries(F.col(quoted(name)), kinds[name]) for name in columns}
    wanted = []
    for query in queries.values():
        wanted += [F.count_if(query.has_null), F.count_if(query.has_nan)]
        for shortest, longest in query.lengths:
            wanted += [F.min(shortest), F.max(longest)]
    found = iter(frame.agg(*wanted).first())  # in the same order
    metadata: Metadata = {}
    for name, query in queries.items():
        nulls, nans = int(next(found)), int(next(found))
        shape = []
        for _ in query.lengths:
            shortest, longest = next(found), next(found)
            check_lengths(name, shortest, longest)
            shape.append(int(longest or 0))
        entry = _entry(kinds[name].simpleString(), tuple(shape), compress_sparse)
        metadata[name] = {**entry, "nulls": nulls, "nans": nans}
    return metadata


def check_lengths(name: str, shortest: int | None, longest: int | None) -> None:
    """Raise ColumnError if not all rows are of one length, or if they are empty."""
    if shortest != longest:
        raise ColumnError(
            f"column {name!r} has rows of {shortest} and of {longest} elements: all rows must have "
            "the same shape, so pad them or cut them first"
        )
    if longest == 0:
        raise ColumnError(
            f"column {name!r} has rows without any element: fill them, or leave the column out"
        )


def _entry(kind: str, shape: tuple[int, ...], compress_sparse: bool) -> dict[str, Any]:
    form = NOCHANGE
    if kind == "vector":
        form = CUSTOM_SPARSE if compress_sparse else ARRAY
    return {
        "spark_data_type": kind,
        "is_sparse_vector_only": False,
        "shape": list(shape) if shape else [1],
        "intermediate_format": form,
        "max_size": int(np.prod(shape)) if shape else 1,
        "nulls": 0,
        "nans": 0,
    }


def quoted(name: str) -> str:
    """Quote a column's name for Spark's expressions, which take a bare dot for a struct's field."""
    return "`" + name.replace("`", "``") + "`"


def plain_column(name: str, kind: str) -> Any:
    """Return a column of a DataFrame for Spark's expressions; vectors become arrays of doubles."""
    import pyspark.sql.functions as F
    from pyspark.ml.functions import vector_to_array

    column = F.col(quoted(name))
    return vector_to_array(column) if kind == "vector" else column


class _Queries:
    """Spark's expressions that find nulls, NaN and lengths in the rows of one column."""

    def __init__(self, column: Any, kind: Any) -> None:
        import pyspark.sql.functions as F
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql.types import ArrayType, DoubleType, FloatType

        self.lengths: list[tuple[Any, Any]] = []  # the least and greatest of each dimension
        self.has_null = column.isNull()
        if kind.simpleString() == "vector":
            column, kind = vector_to_array(column), ArrayType(DoubleType())
        is_first = True
        while isinstance(kind, ArrayType):
            if is_first:
                length = F.when(column.isNotNull(), F.size(column))
                self.lengths.append((length, length))
            else:  # arrays inside an array
                lengths = F.transform(column, F.size)
                self.lengths.append((F.array_min(lengths), F.array_max(lengths)))
                column = F.flatten(column)
            self.has_null |= F.exists(column, lambda value: value.isNull())
            is_first, kind = False, kind.elementType
        if not isinstance(kind, (DoubleType, FloatType)):
            self.has_nan = F.lit(False)
        elif self.lengths:
            self.has_nan = F.exists(column, F.isnan)
        else:
            self.has_nan = F.isnan(column)


def nan_condition(frame: Any, columns: list[str]) -> Any:
    """Return Spark's expression for rows of a DataFrame with NaN in one of the columns."""
    import pyspark.sql.functions as F

    found = F.lit(False)
    for name in columns:
        has_nan = _Queries(F.col(quoted(name)), frame.schema[name].dataType).has_nan
        found |= F.coalesce(has_nan, F.lit(False))  # for a null value the condition is null
    return found


def describe_rows(rows: Rows, kinds: dict[str, str]) -> Metadata:
    """Describe some rows, whose Spark types are `kinds`."""
    for name, array in rows.items():
        if len(array) and not array.size:
            check_lengths(name, 0, 0)
    return {name: _entry(kinds[name], rows[name].shape[1:], False) for name in rows}


def describe_parquet(files: Any, columns: list[str]) -> Metadata:
    """Describe Parquet that others may have written, from its schema and first row."""
    files.check_columns(columns)
    schema = files.dataset.schema
    head = files.dataset.head(1, columns=columns)
    metadata: Metadata = {}
    for name in columns:
        try:
            shape = to_numpy(name, head.column(name)).shape[1:]
        except ColumnError:  # text, or null: transformation_fn may make numbers of it
            shape = ()
        metadata[name] = _entry(str(schema.field(name).type), shape, False)
    return metadata


def head_of_frame(df: Any, columns: Sequence[str], count: int) -> Rows:
    """Return at most `count` rows without nulls; ColumnError if no model can be fed with them."""
    import pyarrow as pa

    kinds = dict(df.dtypes)
    # Names without dots, which some of Spark's functions take for fields of a struct.
    chosen = [
        plain_column(name, kinds[name]).alias(f"c{index}") for index, name in enumerate(columns)
    ]
    head = df.select(*chosen).na.drop().limit(count)
    if hasattr(head, "toArrow"):
        table = pa.table(head.toArrow())
    else:  # Spark 3.5
        table = pa.Table.from_batches(head._collect_as_arrow())
    return {name: to_numpy(name, table.column(index)) for index, name in enumerate(columns)}
