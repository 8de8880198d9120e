"""Remember which DataFrames this process has written to a store, and facts about the data."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from horovod.spark.common.metadata import Metadata


@dataclass(frozen=True)
class DataFacts:
    """Facts about the Parquet of one dataset in a store."""

    dataset_idx: int | None
    train_rows: int
    val_rows: int
    metadata: Metadata
    avg_row_size: int


class TrainingDataCache:
    """Datasets by DataFrame, store and validation. It keeps the DataFrames, so ids stay unique."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # one DataFrame is written at a time
        self._found: dict[Hashable, tuple[Any, DataFacts]] = {}
        self._next = 0

    def get(self, key: Hashable) -> DataFacts | None:
        entry = self._found.get(key)
        return None if entry is None else entry[1]

    def put(self, key: Hashable, frame: Any, facts: DataFacts) -> None:
        self._found[key] = (frame, facts)

    def next_index(self) -> int:
        """Return a number that no other dataset of this process has."""
        self._next += 1
        return self._next - 1

    def by_index(self, index: int) -> DataFacts | None:
        found = (facts for _, facts in self._found.values() if facts.dataset_idx == index)
        return next(found, None)

    def clear(self) -> None:
        self._found.clear()
