"""Add predictions to a DataFrame as new columns, which executors compute in Arrow batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from horovod.spark.common.checks import check_columns
from horovod.spark.common.metadata import Metadata, head_of_frame
from horovod.spark.common.reading.columns import Rows, to_numpy
from horovod.spark.common.reading.row_buffer import row_count

Predict = Callable[[Rows], "list[np.ndarray[Any, Any]]"]


class Predictor(Protocol):
    """A model that is sent to executors, where `load` makes the function that predicts."""

    def load(self) -> Predict: ...


def transform(
    df: Any,
    predictor: Predictor,
    feature_columns: Sequence[str],
    output_columns: Sequence[str],
    metadata: Metadata | None,
) -> Any:
    """Return the DataFrame with the predictions of each row in new columns."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import DoubleType, StructField, StructType

    check_columns(df, feature_columns, "feature column(s)")
    taken = [name for name in output_columns if name in df.columns]
    if taken:
        raise ValueError(
            f"the DataFrame has a column {', '.join(map(repr, taken))} already: "
            "choose other names with setOutputCols"
        )
    sizes = _output_sizes(df, predictor, feature_columns, metadata)
    if len(sizes) != len(output_columns):
        raise ValueError(
            f"the model has {len(sizes)} output(s), but there are {len(output_columns)} output "
            f"column(s): {', '.join(output_columns)}"
        )
    kinds = [DoubleType() if size == 1 else VectorUDT() for size in sizes]
    added = [
        StructField(name, kind, True) for name, kind in zip(output_columns, kinds, strict=True)
    ]
    schema = StructType([*df.schema.fields, *added])
    run = _Prediction(predictor, df.columns, list(feature_columns), list(output_columns), sizes)
    # Spark takes a dot in the name of a column for a field of a struct here.
    plain = df.toDF(*(f"c{index}" for index in range(len(df.columns))))
    return plain.mapInArrow(run, schema)


@dataclass(frozen=True)
class _Prediction:
    """Adds the predictions to the record batches of a partition, on an executor."""

    predictor: Predictor
    columns: list[str]  # the columns of the DataFrame
    features: list[str]
    outputs: list[str]  # names of the new columns
    sizes: list[int]  # values in a row of each new column

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        predict: Predict | None = None
        for batch in batches:
            predict = predict or self.predictor.load()
            arrays, names = list(batch.columns), list(self.columns)
            if batch.num_rows:
                rows = {name: to_numpy(name, arrays[names.index(name)]) for name in self.features}
                outputs = predict(rows)
            else:
                outputs = [np.zeros((0, size)) for size in self.sizes]
            for name, size, output in zip(self.outputs, self.sizes, outputs, strict=True):
                names.append(name)
                arrays.append(_column(name, size, np.asarray(output), batch.num_rows))
            yield pa.RecordBatch.from_arrays(arrays, names)


def _column(name: str, size: int, output: np.ndarray[Any, Any], rows: int) -> Any:
    """Return an output as Spark wants it: doubles, or the structs that stand for dense vectors."""
    import pyarrow as pa

    if output.size != rows * size:
        raise ValueError(
            f"the model gave {output.size} value(s) for {rows} row(s) of {name!r}, "
            f"not {size} for each"
        )
    values = pa.array(np.ascontiguousarray(output, dtype=np.float64).reshape(-1))
    if size == 1:
        return values
    offsets = pa.array(np.arange(0, (rows + 1) * size, size, dtype=np.int32))
    return pa.StructArray.from_arrays(
        [
            pa.array(np.ones(rows, np.int8)),
            pa.nulls(rows, pa.int32()),
            pa.nulls(rows, pa.list_(pa.int32())),
            pa.ListArray.from_arrays(offsets, values),
        ],
        ["type", "size", "indices", "values"],
    )


def _output_sizes(
    df: Any, predictor: Predictor, features: Sequence[str], metadata: Metadata | None
) -> list[int]:
    """Return how many values each output has for a row, found by feeding the model two rows."""
    if metadata and all(name in metadata for name in features):
        # Two rows, so that a dimension of the batch cannot be mistaken for one of the output.
        rows: Rows = {name: _zeros(metadata[name]) for name in features}
    else:  # a model that was not trained by an estimator: look at a row
        rows = head_of_frame(df, features, 2)
        if not row_count(rows):
            raise ValueError("the DataFrame is empty, so the model's outputs cannot be known")
    count = row_count(rows)
    return [int(np.asarray(output).size // count) for output in predictor.load()(rows)]


def _zeros(facts: dict[str, Any]) -> np.ndarray[Any, Any]:
    kind = str(facts["spark_data_type"])
    integral = any(word in kind for word in ("int", "long", "short", "byte", "bool"))
    shape = tuple(facts["shape"])
    row = () if facts["max_size"] == 1 and shape == (1,) and "array" not in kind else shape
    if kind == "vector":
        row = shape
    return np.zeros((2, *row), np.int64 if integral else np.float64)
