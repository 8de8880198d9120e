"""Takes trees of arrays apart into leaves with labels, and puts them together again."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from horovod.jax.arrays import as_array


@dataclasses.dataclass
class Leaves:
    """The leaves of a tree that take part in a collective."""

    arrays: list[Any]
    labels: tuple[str, ...]  # the arrays' paths; empty if the tree is a single array
    _all_leaves: list[Any]
    _indices: list[int]  # the indices of the arrays in `_all_leaves`
    _structure: Any

    def rebuild(self, arrays: Any) -> Any:
        """Return the same tree with other arrays."""
        leaves = list(self._all_leaves)
        for index, array in zip(self._indices, arrays, strict=True):
            leaves[index] = array
        return self._structure.unflatten(leaves)


def flatten(tree: Any) -> Leaves:
    """Return the leaves of a tree; ValueError names one that is neither an array nor a number.

    Gradients of integers, which JAX represents by arrays of type float0, do not take part.
    """
    leaves, structure = jax.tree.flatten(tree)
    paths = paths_of(structure)
    indices = [index for index, leaf in enumerate(leaves) if not _is_no_gradient(leaf)]
    arrays = [as_array(leaves[index], paths[index]) for index in indices]
    labels = () if jax.tree_util.treedef_is_leaf(structure) else paths
    if labels and len(indices) != len(leaves):
        labels = tuple(paths[index] for index in indices)
    return Leaves(arrays, labels, leaves, indices, structure)


def _is_no_gradient(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype == jax.dtypes.float0


@functools.lru_cache(maxsize=1024)
def paths_of(structure: Any) -> tuple[str, ...]:
    """Return the path of each leaf in Python's notation, such as ['layer']['kernel']."""
    tree = structure.unflatten(range(structure.num_leaves))
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(jax.tree_util.keystr(path) for path, _ in leaves)
