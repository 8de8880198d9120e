"""Write a DataFrame to a store as Parquet, and check it on the way."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from horovod.common.logging import get_logger
from horovod.spark.common import metadata as meta
from horovod.spark.common.checks import (
    check_columns,
    check_missing_values,
    check_shape_compatibility,
    check_types,
    check_validation,
)
from horovod.spark.common.job import DataFacts
from horovod.spark.common.metadata import quoted
from horovod.spark.common.old_util import (
    data_type_to_numpy,
    data_type_to_str,
    get_col_info,
    numpy_type_to_str,
    spark_scalar_to_python_type,
    to_list,
)
from horovod.spark.common.reading.columns import ColumnError
from horovod.spark.common.reading.parquet_files import ParquetFiles
from horovod.spark.common.store import is_databricks
from horovod.spark.common.stores.filesystem import split_url

__all__ = [
    "check_columns",
    "check_shape_compatibility",
    "check_validation",
    "choose_columns",
    "clear_training_cache",
    "data_type_to_numpy",
    "data_type_to_str",
    "default_feature_columns",
    "get_col_info",
    "get_dataset_properties",
    "get_simple_meta_from_parquet",
    "is_databricks",
    "numpy_type_to_str",
    "prepare_data",
    "spark_scalar_to_python_type",
    "to_list",
    "train_val_split",
]

logger = get_logger(__name__)

# What this process has written, by DataFrame, store and validation: the DataFrame, kept so that its
# id stays its own, and the facts.
_written: dict[Hashable, tuple[Any, DataFacts]] = {}
_numbers = itertools.count()  # numbers of datasets
_lock = threading.RLock()  # one DataFrame is written at a time

# What Hadoop says of a protocol that it does not know, or knows only the connector's name of.
_NO_CONNECTOR = re.compile(
    r"No FileSystem for scheme|ClassNotFoundException: Class org\.apache\.hadoop\.fs\.\S+ not found"
)
_AZURE = ": org.apache.hadoop:hadoop-azure, of the version of Spark's Hadoop"
_CONNECTORS = {
    "s3": " and call it s3a://, as Hadoop does: org.apache.hadoop:hadoop-aws, of its version",
    "s3a": ": org.apache.hadoop:hadoop-aws, of the version of Spark's Hadoop",
    "gs": ": org.apache.hadoop:hadoop-gcp, or Google's gcs-connector before Hadoop 3.5",
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": f" and call it abfs://, as Hadoop does{_AZURE}",
}


def clear_training_cache() -> None:
    """Forget which DataFrames have been written; the next fit writes again."""
    _written.clear()


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Any,
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    allow_nulls: bool = False,
    seed: int | None = None,
    nan_labels: str = "refuse",
) -> Iterator[int]:
    """Write a DataFrame to the store if it is not there yet; yield the number of the dataset.

    `allow_nulls` accepts nulls, NaN and texts: `transformation_fn` may make numbers of them.
    """
    for name, value in (
        ("num_processes", num_processes),
        ("partitions_per_process", partitions_per_process),
    ):
        if value is None or value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    columns = choose_columns(df, label_columns, feature_columns, validation, sample_weight_col)
    targets = [*label_columns, *([sample_weight_col] if sample_weight_col else [])]
    if not allow_nulls:
        check_types({name: df.schema[name].dataType for name in columns})
    key = (
        id(df),
        store.get_train_data_path(),
        store.get_val_data_path(),
        validation,
        tuple(columns),
        compress_sparse,
        nan_labels == "drop",
    )
    with _lock:
        _, facts = _written.get(key, (None, None))
        if facts is None or not store.is_parquet_dataset(
            store.get_train_data_path(facts.dataset_idx)
        ):
            store.check_writable()
            partitions = num_processes * partitions_per_process
            rows = _without_nan(df, targets) if nan_labels == "drop" else df
            facts = _write(store, rows, columns, validation, compress_sparse, partitions, seed)
            _written[key] = df, facts
            if verbose:
                logger.info(
                    "wrote %d training and %d validation rows to %s",
                    facts.train_rows,
                    facts.val_rows,
                    store.get_train_data_path(facts.dataset_idx),
                )
    if not allow_nulls:
        check_missing_values(facts.metadata, targets, nan_labels)
    assert facts.dataset_idx is not None
    yield facts.dataset_idx


def choose_columns(
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
) -> list[str]:
    """Return the columns to train with: features, labels, weights; ValueError if one is missing."""
    if not label_columns:
        raise ValueError("label_cols is not set: name the column(s) to predict")
    weights = [sample_weight_col] if sample_weight_col else []
    check_columns(df, label_columns, "label column(s)")
    check_columns(df, feature_columns or (), "feature column(s)")
    check_columns(df, weights, "sample_weight_col")
    check_validation(validation, df)
    if feature_columns is None:
        feature_columns = default_feature_columns(df.columns, *label_columns, *weights, validation)
    return list(dict.fromkeys([*feature_columns, *label_columns, *weights]))


def _without_nan(df: Any, targets: list[str]) -> Any:
    """Drop rows with NaN in a label or weight, and log how many there are."""
    has_nan = meta.nan_condition(df, targets)
    dropped = df.filter(has_nan).count()
    if not dropped:
        return df
    logger.warning(
        "nan_labels='drop' leaves out %d row(s) with NaN in %s", dropped, ", ".join(targets)
    )
    return df.filter(~has_nan)


def get_dataset_properties(dataset_idx: int) -> tuple[int, int, meta.Metadata, int]:
    """Return training rows, validation rows, metadata and bytes of a row of a prepared dataset."""
    for _, found in _written.values():
        if found.dataset_idx == dataset_idx:
            return found.train_rows, found.val_rows, found.metadata, found.avg_row_size
    raise ValueError(f"dataset {dataset_idx} was not prepared by this process")


def _write(
    store: Any,
    df: Any,
    columns: list[str],
    validation: float | str | None,
    compress_sparse: bool,
    partitions: int,
    seed: int | None,
) -> DataFacts:
    index = next(_numbers)
    train_path, val_path = store.get_train_data_path(index), store.get_val_data_path(index)
    train, val = _split(df, columns, validation, seed)

    def write(frame: Any, path: str) -> tuple[meta.Metadata, ParquetFiles]:
        _write_frame(frame, path, compress_sparse, partitions)
        written = df.sparkSession.read.parquet(path)
        described = meta.describe(written, columns, compress_sparse)
        return described, ParquetFiles(path, store.storage_options)

    try:
        metadata, train_files = write(train, train_path)
        val_rows = 0
        if val is not None:
            val_metadata, val_files = write(val, val_path)
            val_rows = val_files.num_rows
            _join(metadata, val_metadata)
        for name, kind in df.select(*map(quoted, columns)).dtypes:
            metadata[name]["spark_data_type"] = kind  # vectors may be arrays in the Parquet
        if not train_files.num_rows:
            raise ValueError("the DataFrame has no rows to train with")
        if val is not None and not val_rows:
            raise ValueError(
                f"validation={validation!r} leaves no rows to validate with: "
                "give a larger fraction, or mark rows in the column"
            )
        facts = DataFacts(
            index, train_files.num_rows, val_rows, metadata, train_files.bytes_per_row
        )
        store.write_text(
            store.get_data_metadata_path(train_path),
            json.dumps({"metadata": metadata, "avg_row_size": facts.avg_row_size}),
        )
        return facts
    except BaseException:
        for path in (train_path, val_path):
            with contextlib.suppress(OSError):
                store.remove(path)
        raise


def _split(
    df: Any, columns: list[str], validation: float | str | None, seed: int | None
) -> tuple[Any, Any]:
    """Return the rows to train with and those to validate with; None without validation."""
    import pyspark.sql.functions as F

    chosen = [quoted(name) for name in columns]
    if not validation:
        return df.select(*chosen), None
    if isinstance(validation, str):
        column = F.col(quoted(validation))
        kind = dict(df.dtypes)[validation]
        if kind == "boolean":
            marked = column
        elif kind in ("tinyint", "smallint", "int", "bigint", "float", "double"):
            marked = column > 0
        else:
            raise ValueError(
                f"the validation column {validation!r} is of type {kind}: "
                "it must be boolean, or a number that is positive for validation rows"
            )
        marked = F.coalesce(marked, F.lit(False))
        return df.filter(~marked).select(*chosen), df.filter(marked).select(*chosen)
    train, val = df.select(*chosen).randomSplit([1.0 - validation, float(validation)], seed)
    return train, val


def train_val_split(df: Any, validation: float | str | None) -> tuple[Any, Any, float]:
    """Split a DataFrame as `fit` does.

    Args:
        df: The DataFrame.
        validation: Fraction of the rows to validate with, or the name of a column that marks them.

    Returns:
        The rows to train with, the rows to validate with (None without `validation`), and the
        fraction of rows to validate with.
    """
    check_validation(validation, df)
    train, val = _split(df, df.columns, validation, None)
    if val is None:
        return train, None, 0.0
    if isinstance(validation, str):
        train_rows, val_rows = train.count(), val.count()
        return train, val, val_rows / max(1, train_rows + val_rows)
    return train, val, float(validation or 0.0)


# Upstream's tests and programs have these names.
_get_col_info = get_col_info
_train_val_split = train_val_split


def _write_frame(frame: Any, path: str, compress_sparse: bool, partitions: int) -> None:
    if not compress_sparse:
        columns = [meta.plain_column(name, kind).alias(name) for name, kind in frame.dtypes]
        frame = frame.select(*columns)
    try:
        frame.repartition(partitions).write.mode("overwrite").parquet(path)
    except Exception as error:
        if _NO_CONNECTOR.search(str(error)):
            protocol, _ = split_url(path)
            raise OSError(
                f"Spark has no connector for {protocol}://, so it could not write the DataFrame to "
                f"{path}. Give the session one by spark.jars.packages"
                f"{_CONNECTORS.get(protocol, '')}; or write Parquet there by other means, and call "
                "fit_on_parquet(): the processes read it without Spark"
            ) from error
        raise OSError(
            f"Spark could not write the DataFrame to {path}; nothing half-written is used. If the "
            "cause below names the path, executors need rights and room there; a local path must "
            f"be the same storage on every host. {type(error).__name__}: {error}"
        ) from error


def _join(metadata: meta.Metadata, other: meta.Metadata) -> None:
    for name, facts in other.items():
        known = metadata[name]["max_size"] and facts["max_size"]  # neither part is empty
        if known and facts["shape"] != metadata[name]["shape"]:
            raise ColumnError(
                f"column {name!r} has rows of shape {metadata[name]['shape']} and "
                f"{facts['shape']}: all rows must have the same shape"
            )
        metadata[name]["nulls"] += facts["nulls"]
        metadata[name]["nans"] += facts["nans"]


def get_simple_meta_from_parquet(
    store: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None,
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
) -> tuple[int, int, meta.Metadata, int]:
    """Return training rows, validation rows, metadata and bytes of a row of stored Parquet."""
    train_path = store.get_train_data_path(dataset_idx)
    val_path = store.get_val_data_path(dataset_idx)
    if not store.is_parquet_dataset(train_path):
        raise ValueError(
            f"there is no complete Parquet data at {train_path}: write it there, or give the "
            "store's train_path"
        )
    files = ParquetFiles(train_path, store.storage_options)
    weights = [sample_weight_col] if sample_weight_col else []
    if feature_columns is None:
        names = files.dataset.schema.names
        feature_columns = default_feature_columns(names, *label_columns, *weights)
    columns = list(dict.fromkeys([*feature_columns, *label_columns, *weights]))
    metadata = meta.describe_parquet(files, columns)
    path = store.get_data_metadata_path(train_path)
    if store.exists(path):  # Spark's types and shapes, if an estimator wrote this data
        written = json.loads(store.read(path))["metadata"]
        metadata.update({name: written[name] for name in metadata if name in written})
    val_rows = 0
    if store.is_parquet_dataset(val_path):
        val_rows = ParquetFiles(val_path, store.storage_options).num_rows
    if not files.num_rows:
        raise ValueError(f"the data at {train_path} has no rows")
    return files.num_rows, val_rows, metadata, files.bytes_per_row


def default_feature_columns(columns: Iterable[str], *others: Any) -> list[str]:
    """Return all columns but the others: labels, weights, and the one that marks validation."""
    return [name for name in columns if name not in others]
