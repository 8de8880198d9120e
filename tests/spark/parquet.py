"""Parquet for tests of reading, and a backend for tests of training that need no cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from horovod.spark.common.backend import Backend
from tests.ranks import RankPool

PATIENCE = 900.0  # seconds; importing TensorFlow alone may take a busy machine minutes


def write(folder: Path, columns: dict[str, Any], files: int = 3, row_group: int = 7) -> Path:
    """Columns as a directory of Parquet files with several row groups each."""
    table = pa.table(columns)
    folder.mkdir(parents=True, exist_ok=True)
    edges = np.linspace(0, table.num_rows, files + 1).astype(int)
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        path = folder / f"part-{number:05}.parquet"
        parquet.write_table(table.slice(start, stop - start), path, row_group_size=row_group)
    (folder / "_SUCCESS").touch()
    return folder


def points(rows: int = 96, seed: int = 7) -> dict[str, Any]:
    """Columns x (3 numbers), x0 (the first), y (their weighted sum), k (a class) and w."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)
    return {
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 3).cast(
            pa.list_(pa.float32())
        ),
        "x0": x[:, 0],
        "y": y,
        "k": (y > 0).astype(np.int64),
        "w": np.where(np.arange(rows) % 2, 1.0, 3.0),
    }


class PoolBackend(Backend):
    """Trains on ranks that are there already."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool
        self.environments: list[dict[str, str] | None] = []

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        self.environments.append(env)
        return self.pool.run(lambda: fn(*args, **(kwargs or {})), timeout=PATIENCE)

    def num_processes(self) -> int:
        return self.pool.size
