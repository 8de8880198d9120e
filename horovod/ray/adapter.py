"""The interface between `RayExecutor` and its two implementations, static and elastic_v2.

An adapter lives in the driver, or through Ray Client in an actor on the cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.ray.params import BaseParams

__all__ = ["Adapter", "BaseParams", "Callback", "Executable", "as_call"]

Callback = Callable[[Any], object]

Executable = tuple[type | None, Sequence[Any] | None, Mapping[str, Any] | None]
"""The object that each worker makes for itself: its class, if there is one, args and kwargs."""


class Adapter(ABC):
    """Starts workers, and calls functions on them."""

    @abstractmethod
    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        """Start the workers, each with an object of its own and these environment variables."""

    @abstractmethod
    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        """Call ``fn(executable)`` on every worker; return what each returned, by rank."""

    @abstractmethod
    def execute_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Do the same without waiting; return one ObjectRef for each rank."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone; return what it returned."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers, and give back the resources that they occupied."""


def as_call(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    """Return a function that ignores a worker's executable and calls ``fn(*args, **kwargs)``."""
    if not callable(fn):
        raise ValueError(f"a function is needed to call on the workers, not {fn!r}")
    positional, named = tuple(args or ()), dict(kwargs or {})
    return lambda executable: fn(*positional, **named)
