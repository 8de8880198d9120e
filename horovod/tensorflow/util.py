"""Small helpers that scripts import from `horovod.tensorflow`, as upstream's own code does."""

from __future__ import annotations

import importlib.util
from typing import Any

import tensorflow as tf

from horovod.common import util
from horovod.common.util import split_list


def _executing_eagerly() -> bool:
    """Return whether operations run at once instead of becoming part of a graph."""
    return bool(tf.executing_eagerly())


def vars_to_refs(variables: Any) -> Any:
    """Return hashable references to `variables`; lists and tuples become tuples, also nested."""
    if isinstance(variables, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in variables)
    return variables.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables of `refs`, a result of `vars_to_refs`; tuples become lists."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework of a binding sees a GPU.

    Args:
        ext_base_name: The binding, such as "tensorflow" or "torch".
        verbose: Whether to say why there is none; False by default.

    Returns:
        True or False.
    """
    if ext_base_name == "tensorflow":
        return bool(tf.config.list_physical_devices("GPU"))
    return util.gpu_available(ext_base_name, verbose)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if a binding does not exist.

    Args:
        ext_name: The binding, such as "horovod.tensorflow".
        ext_env_var: Accepted for compatibility; upstream found its compiled part with it.
        pkg_path: Accepted for compatibility; upstream found its compiled part with it.

    Raises:
        ImportError: There is no such binding.
    """
    if importlib.util.find_spec(ext_name) is None:
        raise ImportError(f"there is no binding {ext_name}")


__all__ = ["check_extension", "gpu_available", "refs_to_vars", "split_list", "vars_to_refs"]
