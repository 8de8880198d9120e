"""Which DataFrames have been written to which store already, in this process."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prepared:
    """A dataset in a store, and what is known of it."""

    index: int
    train_rows: int
    val_rows: int
    metadata: dict[str, dict[str, Any]]
    avg_row_size: int


class TrainingDataCache:
    """Datasets by DataFrame, store and validation; DataFrames are kept, so ids stay theirs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # one DataFrame is written at a time
        self._found: dict[Hashable, tuple[Any, Prepared]] = {}
        self._next = 0

    def get(self, key: Hashable) -> Prepared | None:
        entry = self._found.get(key)
        return None if entry is None else entry[1]

    def put(self, key: Hashable, frame: Any, prepared: Prepared) -> None:
        self._found[key] = (frame, prepared)

    def next_index(self) -> int:
        """A number that no other dataset of this process has."""
        self._next += 1
        return self._next - 1

    def by_index(self, index: int) -> Prepared | None:
        for _, prepared in self._found.values():
            if prepared.index == index:
                return prepared
        return None

    def clear(self) -> None:
        self._found.clear()
