"""What `RayExecutor` asks of an implementation; static and elastic_v2 are the two there are.

An adapter lives in the driver, or through Ray Client in an actor on the cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.ray.params import BaseParams

__all__ = ["Adapter", "BaseParams", "Call", "Callback", "Executable"]

Callback = Callable[[Any], object]

Executable = tuple[type | None, Sequence[Any] | None, Mapping[str, Any] | None]
"""The object that each worker makes for itself: its class, if there is one, args and kwargs."""


class Adapter(ABC):
    """Starts workers, and has functions called on them."""

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
        """Like `execute`, but return at once: one ObjectRef for each rank."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone; return what it returned."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and give back what they occupied."""


class Call:
    """``fn(*args, **kwargs)`` as a function of a worker's executable, which it does not need."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> None:
        if not callable(fn):
            raise ValueError(f"a function is needed to call on the workers, not {fn!r}")
        self._fn = fn
        self._args = tuple(args or ())
        self._kwargs = dict(kwargs or {})

    def __call__(self, executable: Any) -> Any:
        return self._fn(*self._args, **self._kwargs)
