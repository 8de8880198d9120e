"""`optimizer.variables`, which used to be `optimizer.variables()`."""

from __future__ import annotations

from typing import Any


class CallableList(list[Any]):
    """A list that scripts may also call, to get the list."""

    def __call__(self) -> CallableList:
        return self
