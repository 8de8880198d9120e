"""Names of `horovod.spark.common` that programs for 0.28.1 import, and what they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.sql import types

from horovod.spark.common import constants, util
from tests.spark.frames import points
from tests.spark.parquet import PATIENCE

pytestmark = pytest.mark.timeout(PATIENCE)


def test_constants():
    assert (constants.ARRAY, constants.CUSTOM_SPARSE, constants.NOCHANGE) == (
        "array",
        "custom_sparse_format",
        "nochange",
    )
    assert constants.ONE_GB * constants.TOTAL_BUFFER_MEMORY_CAP == 4 * 1024**3


def test_names_of_types():
    from pyspark.ml.linalg import DenseVector, VectorUDT

    assert util.data_type_to_str(types.IntegerType) == "Int"
    assert util.data_type_to_str(VectorUDT) == "Vector"
    assert util.spark_scalar_to_python_type(types.BooleanType) is bool
    assert util.data_type_to_numpy(types.FloatType) is np.float32
    assert util.data_type_to_numpy(DenseVector) is np.float64
    assert util.numpy_type_to_str(np.int64) == "Long"
    for function, wrong in (
        (util.data_type_to_str, types.MapType),
        (util.data_type_to_numpy, types.MapType),
        (util.spark_scalar_to_python_type, types.ArrayType),
        (util.numpy_type_to_str, np.complex64),
    ):
        with pytest.raises(ValueError, match="there is no name for the"):
            function(wrong)


def test_lists():
    assert util.to_list(None, 2) is None
    assert util.to_list(0.5, 2) == [0.5, 0.5]
    assert util.to_list([1, 2], 2) == [1, 2]
    with pytest.raises(ValueError, match="3 values where 2 are needed"):
        util.to_list([1, 2, 3], 2)


def test_what_is_asked_of_a_dataframe(spark: Any):
    from pyspark.ml.linalg import DenseVector, SparseVector

    df = points(spark)
    kinds, shapes, sizes = util._get_col_info(df)
    assert kinds["x"] == {DenseVector, SparseVector}
    assert (kinds["y"], kinds["k"], kinds["val"]) == ({float}, {int}, {bool})
    assert (shapes["x"], shapes["y"], sizes["x"], sizes["y"]) == (3, 1, 3, 1)
    train, val, fraction = util.train_val_split(df, "val")
    assert (train.count(), val.count(), fraction) == (72, 24, 0.25)
    train, val, fraction = util._train_val_split(df, 0.5)
    assert train.count() + val.count() == 96
    assert fraction == 0.5
    assert util.train_val_split(df, None)[1:] == (None, 0.0)
