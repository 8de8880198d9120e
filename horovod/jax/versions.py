"""Checks that this binding supports the installed JAX; `horovod.jax` calls it when imported."""

from __future__ import annotations

import importlib.metadata
import warnings

from packaging.version import Version

from horovod.common.exceptions import HorovodVersionMismatchError

OLDEST, NEXT = "0.9", "0.12"  # the first as in the extra horovod[jax]


def check() -> None:
    """Raise ImportError if JAX is missing or too old; warn if it is newer than the tested ones."""
    try:
        version = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            "horovod.jax needs JAX, which is not installed: pip install 'horovod[jax]'"
        ) from error
    if Version(version) < Version(OLDEST):
        raise HorovodVersionMismatchError("JAX", version, f"{OLDEST} or newer, below {NEXT}")
    if Version(version) >= Version(NEXT):
        warnings.warn(
            f"horovod.jax was tested with JAX from {OLDEST} to below {NEXT}, not with {version}",
            stacklevel=3,
        )
