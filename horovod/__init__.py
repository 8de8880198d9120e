"""Distributed training with one small API: ``import horovod.torch as hvd`` in a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod.common import basics as _basics

if TYPE_CHECKING:
    from horovod.common.inherited import clean_environment
    from horovod.runner.functions.run_function import run

__version__ = "0.29.0"

__all__ = ["__version__", "clean_environment", "run"]


def __getattr__(name: str) -> Any:
    """``horovod.run`` needs the launcher, which a training script should not have to import."""
    if name == "clean_environment":
        from horovod.common.inherited import clean_environment

        return clean_environment
    if name == "run":
        from horovod.runner.functions.run_function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _find_basics() -> Any:
    from horovod.engine.basics import HorovodBasics

    return HorovodBasics


_basics.find_class = _find_basics
