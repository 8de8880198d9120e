"""DataFrames and models that the tests of the estimators share: small, made, and learnable."""

from __future__ import annotations

from typing import Any

import numpy as np


def points(spark: Any, rows: int = 96, partitions: int = 2) -> Any:
    """Columns x (vector of 3), y (their weighted sum), k (class 0 or 1), w and val."""
    from pyspark.ml.linalg import Vectors

    random = np.random.default_rng(7)
    data = []
    for index, row in enumerate(random.normal(size=(rows, 3))):
        y = float(row @ [1.0, -2.0, 0.5])
        vector = Vectors.dense(row) if index % 2 else Vectors.sparse(3, list(enumerate(row)))
        weight = 1.0 + index % 3
        data.append((vector, float(row[0]), y, int(y > 0), weight, index % 4 == 0))
    columns = ["x", "x0", "y", "k", "w", "val"]
    return spark.createDataFrame(data, columns).repartition(partitions)
