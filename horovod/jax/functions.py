"""Giving all ranks the same parameters, and sending any Python object.

Exported to users by `horovod.jax`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine import objects
from horovod.engine.arguments import set_id
from horovod.jax import primitive
from horovod.jax.movements import broadcast

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's tree of parameters, optimizer state or both, as a new tree, in one operation.

    Takes arrays, random keys and numbers. HorovodInternalError on all ranks, naming the paths, if
    the ranks' trees differ.
    """
    leaves, structure = jax.tree.flatten(params)
    sent = broadcast(structure.unflatten(map(_sendable, leaves)), root_rank, name, process_set)
    received = [_like(new, old) for new, old in zip(jax.tree.leaves(sent), leaves, strict=True)]
    return structure.unflatten(received)


def _sendable(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_random_key(leaf) else leaf


def _like(received: Any, leaf: Any) -> Any:
    if is_random_key(leaf):
        return jax.random.wrap_key_data(received, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(received.item())
    return received


def is_random_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank; what the others pass is ignored.

    The root gets back the very object it passed.
    """
    primitive.wait_for_programs("broadcast_object")
    return objects.broadcast_object(obj, root_rank, name or "broadcast_object", set_id(process_set))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in the order of ranks."""
    primitive.wait_for_programs("allgather_object")
    return objects.allgather_object(obj, name or "allgather_object", set_id(process_set))
