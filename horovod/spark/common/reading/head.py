"""Read the first rows of a DataFrame or of Parquet, with which the driver tries a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.spark.common.metadata import plain_column
from horovod.spark.common.reading.columns import Rows, rows_of, to_numpy


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


def head_of_parquet(files: Any, columns: Sequence[str], count: int) -> Rows:
    """Return the first rows of `ParquetFiles`; a null is a ColumnError here."""
    return rows_of(files.dataset.head(count, columns=list(columns)))
