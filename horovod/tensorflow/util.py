"""Small helpers that scripts import from `horovod.tensorflow`, as upstream's own code does."""

from __future__ import annotations

import importlib.util
from typing import Any

import tensorflow as tf

from horovod.common import util
from horovod.common.util import split_list


def _executing_eagerly() -> bool:
    """Whether operations run at once rather than becoming part of a graph."""
    return bool(tf.executing_eagerly())


def vars_to_refs(variables: Any) -> Any:
    """Hashable references to `variables`, in (nested) tuples where there were lists or tuples."""
    if isinstance(variables, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in variables)
    return variables.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables of `refs`, what `vars_to_refs` returned, in (nested) lists."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework of the binding `ext_base_name` ("tensorflow", "torch", ...) sees a GPU.

    `verbose` says why not.
    """
    if ext_base_name == "tensorflow":
        return bool(tf.config.list_physical_devices("GPU"))
    return util.gpu_available(ext_base_name, verbose)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError if the binding `ext_name`, such as "horovod.tensorflow", is not there.

    `ext_env_var` and `pkg_path` told upstream where to find its compiled part; there is none here.
    """
    if importlib.util.find_spec(ext_name) is None:
        raise ImportError(f"there is no binding {ext_name}")


__all__ = ["check_extension", "gpu_available", "refs_to_vars", "split_list", "vars_to_refs"]
