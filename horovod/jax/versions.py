"""Whether the installed JAX is one that this binding works with. Checked when it is imported."""

from __future__ import annotations

import importlib.metadata
import warnings

from packaging.version import Version

from horovod.common.exceptions import HorovodVersionMismatchError

OLDEST, NEXT = "0.9", "0.12"  # the first as in the extra horovod[jax]


def check() -> None:
    """ImportError if JAX is missing or too old; a warning if it is newer than what was tried."""
    try:
        found = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            "horovod.jax needs JAX, which is not installed: pip install 'horovod[jax]'"
        ) from error
    if Version(found) < Version(OLDEST):
        raise HorovodVersionMismatchError("JAX", found, f"{OLDEST} or newer, below {NEXT}")
    if Version(found) >= Version(NEXT):
        warnings.warn(
            f"horovod.jax was tested with JAX from {OLDEST} to below {NEXT}, not with {found}",
            stacklevel=3,
        )
