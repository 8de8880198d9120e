"""What `RayExecutor` asks of an implementation; static and elastic_v2 are the two there are.

An adapter lives in the driver, or through Ray Client in an actor on the cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.ray.params import BaseParams

__all__ = ["Adapter", "BaseParams", "Callback", "Call"]

Callback = Callable[[Any], object]


class Adapter(ABC):
    """Starts workers, and has functions called on them."""

    @abstractmethod
    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers, each with an object of its own if `executable_cls` is given."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every worker; what each returned, by rank."""
        return self.execute(Call(fn, args, kwargs), callbacks)

    @abstractmethod
    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Like `run`, but returns at once: one ObjectRef for each rank."""

    @abstractmethod
    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        """Call ``fn(executable)`` on every worker; what each returned, by rank."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone."""

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
