"""What the contract test needs to know of each framework: arrays, values and kinds of errors."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Framework:
    """A framework and the binding for it; used inside ranks."""

    name: str
    package: str
    mismatch: tuple[str, str] = ("horovod.common.exceptions", "HorovodInternalError")
    invalid: tuple[str, str] = ("builtins", "ValueError")
    missing: frozenset[str] = field(default_factory=frozenset)  # parts of the contract

    @property
    def hvd(self) -> Any:
        return importlib.import_module(f"horovod.{self.name}")

    def array(self, values: Any, dtype: str = "float32") -> Any:
        array = np.asarray(values, dtype)
        if self.name == "torch":
            return importlib.import_module("torch").from_numpy(array)
        if self.name == "tensorflow":
            return importlib.import_module("tensorflow").constant(array)
        if self.name == "jax":
            return importlib.import_module("jax.numpy").asarray(array)
        return importlib.import_module("mxnet").nd.array(np.atleast_1d(array), dtype=array.dtype)

    def values(self, array: Any) -> Any:
        """As lists; a scalar as a list of one, which is all that MXNet has."""
        array = array.asnumpy() if hasattr(array, "asnumpy") else np.asarray(array)
        return np.atleast_1d(array).tolist()

    def error(self, kind: str) -> type[Exception]:
        module, name = getattr(self, kind)
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

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
        Framework("torch", "torch"),
        Framework(
            "tensorflow",
            "tensorflow",
            mismatch=("tensorflow", "errors.FailedPreconditionError"),
            invalid=("tensorflow", "errors.InvalidArgumentError"),
        ),
        Framework("jax", "jax"),
        Framework(
            "mxnet",
            "mxnet",
            mismatch=("mxnet", "base.MXNetError"),
            invalid=("mxnet", "base.MXNetError"),
            missing=frozenset({"join"}),
        ),
    )
}
