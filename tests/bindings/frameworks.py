"""What the contract test needs to know of each framework: arrays, values and kinds of errors."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import platform
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def _find(module: str, name: str) -> Any:
    """What a module calls by that name, which may have dots."""
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def mxnet_array(array: Any) -> Any:
    return _find("mxnet", "nd.array")(np.atleast_1d(array), dtype=array.dtype)


@dataclass(frozen=True)
class Framework:
    """A framework and the binding for it; used inside ranks. Pairs: a module, a name in it."""

    name: str
    package: str
    from_numpy: tuple[str, str]  # what makes an array of the framework
    mismatch: tuple[str, str] = ("horovod.common.exceptions", "HorovodInternalError")
    invalid: tuple[str, str] = ("builtins", "ValueError")
    missing: frozenset[str] = field(default_factory=frozenset)  # parts of the contract

    @property
    def hvd(self) -> Any:
        return importlib.import_module(f"horovod.{self.name}")

    def array(self, values: Any, dtype: str = "float32") -> Any:
        return _find(*self.from_numpy)(np.asarray(values, dtype))

    def values(self, array: Any) -> Any:
        """As lists; a scalar as a list of one, which is all that MXNet has."""
        array = array.asnumpy() if hasattr(array, "asnumpy") else np.asarray(array)
        return np.atleast_1d(array).tolist()

    def error(self, kind: str) -> type[Exception]:
        error: type[Exception] = _find(*getattr(self, kind))
        return error

    def unusable(self) -> str | None:
        """Why it cannot be used here."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.name == "mxnet" and platform.machine() != "x86_64":
            return f"MXNet does not load on {platform.machine()}"
        return None


FRAMEWORKS = {
    each.name: each
    for each in (
        Framework("torch", "torch", ("torch", "from_numpy")),
        Framework(
            "tensorflow",
            "tensorflow",
            ("tensorflow", "constant"),
            mismatch=("tensorflow", "errors.FailedPreconditionError"),
            invalid=("tensorflow", "errors.InvalidArgumentError"),
        ),
        Framework("jax", "jax", ("jax.numpy", "asarray")),
        Framework(
            "mxnet",
            "mxnet",
            (__name__, "mxnet_array"),
            mismatch=("mxnet", "base.MXNetError"),
            invalid=("mxnet", "base.MXNetError"),
            missing=frozenset({"join"}),
        ),
    )
}
