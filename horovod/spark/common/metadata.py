"""What is known of the columns: type and shape, from Spark's schema and from Parquet."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.spark.common.columns import ColumnError, to_numpy

Metadata = dict[str, dict[str, Any]]

NOCHANGE, ARRAY, CUSTOM_SPARSE = "nochange", "array", "custom_sparse_format"


def describe(frame: Any, columns: list[str], compress_sparse: bool) -> Metadata:
    """Type and shape of the columns of a DataFrame that was written to Parquet.

    One query over the Parquet finds nulls and rows whose lengths differ.
    """
    import pyspark.sql.functions as F

    kinds = {field.name: field.dataType for field in frame.schema.fields}
    wanted = []
    for name in columns:
        column = F.col(_quoted(name))
        wanted.append(F.count_if(column.isNull()).alias(f"null {name}"))
        for depth, length in enumerate(_lengths(column, kinds[name])):
            wanted.append(F.min(length).alias(f"min {depth} {name}"))
            wanted.append(F.max(length).alias(f"max {depth} {name}"))
    found = frame.agg(*wanted).first().asDict()
    metadata: Metadata = {}
    for name in columns:
        shape = []
        for depth in range(len(_lengths(F.col(_quoted(name)), kinds[name]))):
            shortest, longest = found[f"min {depth} {name}"], found[f"max {depth} {name}"]
            if shortest != longest:
                raise ColumnError(
                    f"column {name!r} has rows of {shortest} and of {longest} elements: all rows "
                    "must have the same shape, so pad them or cut them first"
                )
            shape.append(int(longest or 0))
        metadata[name] = _entry(kinds[name].simpleString(), tuple(shape), compress_sparse)
        metadata[name]["nulls"] = int(found[f"null {name}"])
    return metadata


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
    }


def check_nulls(metadata: Metadata) -> None:
    """ColumnError if a column has nulls; `transformation_fn` may fill them, so not always asked."""
    for name, facts in metadata.items():
        if facts["nulls"]:
            raise ColumnError(
                f"column {name!r} has {facts['nulls']} null value(s): fill them or drop the rows "
                "(df.na.fill, df.na.drop) before training"
            )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _lengths(column: Any, kind: Any) -> list[Any]:
    """How long a row of this column is in each dimension."""
    import pyspark.sql.functions as F
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.types import ArrayType

    if kind.simpleString() == "vector":
        return [F.when(column.isNotNull(), F.size(vector_to_array(column)))]
    found = []
    while isinstance(kind, ArrayType):
        found.append(F.when(column.isNotNull(), F.size(column)))
        column, kind = column[0], kind.elementType
    return found


def describe_parquet(files: Any, columns: list[str]) -> Metadata:
    """The same of Parquet that others may have written, from its schema and first rows."""
    schema = files.dataset.schema
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise ColumnError(
            f"the data at {files.url} has no column {', '.join(map(repr, missing))}; "
            f"it has {', '.join(schema.names)}"
        )
    head = files.dataset.head(1, columns=columns)
    metadata: Metadata = {}
    for name in columns:
        try:
            shape = to_numpy(name, head.column(name)).shape[1:]
        except ColumnError:  # text, or null: transformation_fn may make numbers of it
            shape = ()
        metadata[name] = _entry(str(schema.field(name).type), shape, False)
    return metadata
