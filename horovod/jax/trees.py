"""Trees of arrays, as JAX's users keep them: their leaves, and what the user calls each."""

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
    labels: tuple[str, ...]  # their paths; none for a lone array
    _all: list[Any]
    _indices: list[int]  # where the arrays are among all leaves
    _structure: Any

    def rebuilt(self, arrays: Any) -> Any:
        """The same tree with other arrays."""
        leaves = list(self._all)
        for index, array in zip(self._indices, arrays, strict=True):
            leaves[index] = array
        return self._structure.unflatten(leaves)


def flatten(tree: Any) -> Leaves:
    """The leaves of a tree, all of them arrays or numbers; ValueError naming one that is not.

    What JAX has as the gradient of an integer (float0) stays as it is and does not take part.
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
    """How to get from a tree to each leaf, as in Python: ['layer']['kernel']."""
    tree = structure.unflatten(range(structure.num_leaves))
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(jax.tree_util.keystr(path) for path, _ in found)
