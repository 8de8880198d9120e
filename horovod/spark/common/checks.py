"""Check an estimator's columns on the driver, before processes are started.

`HorovodEstimator` and `util.prepare_data` call these functions. Every error names the column, what
it holds, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.spark.common.metadata import Metadata
from horovod.spark.common.reading.columns import ColumnError

NAN_LABELS = ("refuse", "drop", "keep")


def check_nan_labels(choice: Any) -> None:
    """Raise ValueError if `nan_labels` is not one of its three words."""
    if choice not in NAN_LABELS:
        raise ValueError(f"nan_labels must be one of {', '.join(NAN_LABELS)}, not {choice!r}")


def check_validation(validation: Any, df: Any = None) -> None:
    """Raise ValueError if `validation` is neither a fraction nor a column of the DataFrame."""
    if validation is None:
        return
    if isinstance(validation, bool) or not isinstance(validation, (int, float, str)):
        raise ValueError(
            "validation must be a fraction of the rows (a float) or the name of a column, "
            f"not {validation!r}"
        )
    if isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise ValueError(
                f"the validation column {validation!r} is not in the DataFrame, which has "
                f"{', '.join(df.columns)}"
            )
    elif not 0 <= validation < 1:
        raise ValueError(f"validation must be at least 0 and less than 1, not {validation}")


def check_columns(df: Any, columns: Sequence[str], what: str) -> None:
    """Raise ValueError if the DataFrame lacks one of these columns."""
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise ValueError(
            f"{what} {', '.join(map(repr, missing))} not in the DataFrame, which has "
            f"{', '.join(df.columns)}"
        )


def check_types(kinds: Mapping[str, Any]) -> None:
    """Raise ColumnError if a column's Spark type holds something that is not a number."""
    for name, kind in kinds.items():
        if not _is_numeric(kind):
            raise ColumnError(
                f"column {name!r} is of type {kind.simpleString()}, which a model cannot be fed "
                "with: make numbers of it in the DataFrame (cast, StringIndexer, OneHotEncoder), "
                "or in transformation_fn"
            )


def _is_numeric(kind: Any) -> bool:
    from pyspark.sql.types import ArrayType, BooleanType, NumericType

    while isinstance(kind, ArrayType):
        kind = kind.elementType
    return isinstance(kind, (BooleanType, NumericType)) or kind.simpleString() == "vector"


def check_missing_values(
    metadata: Metadata, targets: Sequence[str], nan_labels: str = "refuse"
) -> None:
    """Raise ColumnError if a column has nulls, or one of `targets` has NaN.

    Args:
        metadata: What is known of the columns.
        targets: Label columns and the column of weights.
        nan_labels: "keep" accepts NaN in labels.
    """
    for name, facts in metadata.items():
        if facts["nulls"]:
            raise ColumnError(
                f"column {name!r} has {facts['nulls']} null value(s): fill them or drop the rows "
                "(df.na.fill, df.na.drop) before training"
            )
        if name in targets and facts.get("nans") and nan_labels != "keep":
            raise ColumnError(
                f"column {name!r} has {facts['nans']} row(s) with NaN, which would make the loss "
                f"NaN: drop them with df.na.drop(subset=[{name!r}]) or nan_labels='drop', or set "
                "nan_labels='keep' if the loss leaves them out"
            )


def check_shape_compatibility(
    metadata: Metadata,
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Sequence[int]] | None = None,
    output_shapes: Sequence[Sequence[int]] | None = None,
    label_shapes: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raise ValueError if columns do not fit the shapes that the model or the user wants."""
    _check_shapes(metadata, feature_columns, input_shapes, "input", "feature column")
    _check_shapes(metadata, label_columns, label_shapes, "label shape", "label column")
    if output_shapes is not None and len(output_shapes) != len(label_columns):
        raise ValueError(
            f"the model has {len(output_shapes)} output(s), but there are {len(label_columns)} "
            f"label column(s): {', '.join(label_columns)}"
        )


def _check_shapes(
    metadata: Metadata,
    columns: Sequence[str],
    shapes: Sequence[Sequence[int]] | None,
    what: str,
    kind: str,
) -> None:
    if shapes is None:
        return
    if len(shapes) != len(columns):
        raise ValueError(
            f"there are {len(shapes)} {what}(s) {list(map(tuple, shapes))}, but {len(columns)} "
            f"{kind}(s): {', '.join(columns)}"
        )
    for name, shape in zip(columns, shapes, strict=True):
        known = [size for size in shape if size is not None and size > 0]
        wanted = math.prod(known)
        unknown = len(shape) - len(known)
        found = int(metadata[name]["max_size"])
        # One unknown size is the batch, and a row then has exactly the other elements. With more
        # of them a row fits if the known sizes divide it.
        if (unknown <= 1 and wanted != found) or (unknown > 1 and found % wanted):
            raise ValueError(
                f"{kind} {name!r} has {found} element(s) in a row (shape "
                f"{metadata[name]['shape']}), which do not fit the {what} {tuple(shape)}"
            )
