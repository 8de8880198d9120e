"""The first rows of a DataFrame or of Parquet, as arrays: what the driver tries things with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.spark.common.metadata import quoted
from horovod.spark.common.reading.columns import Rows, to_numpy


def head_of_frame(df: Any, columns: Sequence[str], count: int) -> Rows:
    """At most `count` rows that have no nulls; ColumnError if no model can be fed with them."""
    import pyarrow as pa
    import pyspark.sql.functions as F
    from pyspark.ml.functions import vector_to_array

    kinds = dict(df.dtypes)
    chosen = [
        (vector_to_array(F.col(quoted(name))) if kinds[name] == "vector" else F.col(quoted(name)))
        # Names without dots, which some of Spark's functions take for fields of a struct.
        .alias(f"c{place}")
        for place, name in enumerate(columns)
    ]
    head = df.select(*chosen).na.drop().limit(count)
    table = pa.table(head.toArrow()) if hasattr(head, "toArrow") else _to_arrow(head)
    return {name: to_numpy(name, table.column(place)) for place, name in enumerate(columns)}


def head_of_parquet(files: Any, columns: Sequence[str], count: int) -> Rows:
    """The same of `ParquetFiles`; a null is a ColumnError here."""
    table = files.dataset.head(count, columns=list(columns))
    return {name: to_numpy(name, table.column(place)) for place, name in enumerate(columns)}


def _to_arrow(frame: Any) -> Any:
    """Spark 3.5 has no public `toArrow`."""
    import pyarrow as pa

    return pa.Table.from_batches(frame._collect_as_arrow())
