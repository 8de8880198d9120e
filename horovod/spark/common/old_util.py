"""Functions that old programs import from `horovod.spark.common.util`; nothing here calls them.

`util` has their names; docs/old_names.md lists them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.spark.common.metadata import describe, quoted

_NAMES = {  # Spark's type: its text, Python's type, numpy's type
    "IntegerType": ("Int", int, np.int32),
    "LongType": ("Long", int, np.int64),
    "FloatType": ("Float", float, np.float32),
    "DoubleType": ("Double", float, np.float64),
    "BooleanType": ("Boolean", bool, np.bool_),
    "StringType": ("String", str, np.uint8),
    "BinaryType": ("Binary", bytes, np.uint8),
}
_VECTORS = ("VectorUDT", "SparseVector", "DenseVector")
_NUMPY = {np.dtype(kind).name: text for text, _, kind in _NAMES.values() if text != "String"}


def data_type_to_str(dtype: Any) -> str:
    """Return the word for a class of Spark types, such as "Double" for `DoubleType`."""
    return "Vector" if dtype.__name__ in _VECTORS else _known(dtype)[0]


def spark_scalar_to_python_type(dtype: Any) -> type:
    """Return Python's type of the values of a class of Spark types."""
    return _known(dtype)[1]


def data_type_to_numpy(dtype: Any) -> Any:
    """Return numpy's type for a class of Spark types; vectors and arrays are doubles."""
    return np.float64 if dtype.__name__ in (*_VECTORS, "ArrayType") else _known(dtype)[2]


def _known(dtype: Any) -> Any:
    if dtype.__name__ not in _NAMES:
        raise ValueError(f"there is no name for the Spark type {dtype!r}")
    return _NAMES[dtype.__name__]


def numpy_type_to_str(dtype: Any) -> str:
    """Return the word for a type of numpy, such as "Double" for `numpy.float64`."""
    name = np.dtype(dtype).name
    if name not in _NUMPY:
        raise ValueError(f"there is no name for the numpy type {dtype!r}")
    return _NUMPY[name]


def to_list(value: Any, length: int) -> list[Any] | None:
    """Return a list of `length` values; a single one is repeated, and None stays None.

    Raises:
        ValueError: `value` is a list of another length.
    """
    if value is None:
        return None
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(values) == 1:
        values *= length
    if len(values) != length:
        raise ValueError(f"there are {len(values)} values where {length} are needed")
    return values


def get_col_info(df: Any) -> tuple[dict[str, set[type]], dict[str, int], dict[str, int]]:
    """Look at all rows of a DataFrame.

    Returns:
        Three dicts by column: the types of its values, the number of elements in a row, and how
        many of these are stored at most (fewer in sparse vectors).
    """
    from pyspark.sql.types import ArrayType

    facts = describe(df, df.columns, False)
    types: dict[str, set[type]] = {}
    sizes: dict[str, int] = {}
    for field in df.schema.fields:
        name = field.name
        if field.dataType.simpleString() == "vector":
            found = df.select(quoted(name)).rdd.map(_vector_facts).distinct().collect()
            types[name] = {kind for kind, _ in found}
            sizes[name] = max(size for _, size in found)
        else:
            is_array = isinstance(field.dataType, ArrayType)
            types[name] = {list if is_array else spark_scalar_to_python_type(type(field.dataType))}
            sizes[name] = int(facts[name]["max_size"])
    return types, {name: int(facts[name]["max_size"]) for name in df.columns}, sizes


def _vector_facts(row: Any) -> tuple[type, int]:
    return type(row[0]), len(row[0].values)
