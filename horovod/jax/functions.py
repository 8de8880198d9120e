"""Gives all ranks the same parameters or Python objects; `horovod.jax` exports it to users."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine import objects
from horovod.engine.arguments import set_id
from horovod.jax.compiled import primitive
from horovod.jax.movements import broadcast

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give all ranks the root's parameters, optimizer state, or both, as a new tree.

    Args:
        params: Tree of arrays, random keys and numbers, with the same structure on all ranks. It
            travels as one operation.
        root_rank: Rank whose values all ranks get. The default is 0.
        name: Name by which the ranks match this operation. By default they match operations by the
            order of their calls.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A tree like `params` with the root's values; `params` itself does not change.

    Raises:
        HorovodInternalError: The trees of the ranks differ. The message names the paths that do, on
            all ranks.
        ValueError: `root_rank` is not in the process set.

    Examples:
        >>> params = hvd.broadcast_parameters(params, root_rank=0)
    """
    leaves, structure = jax.tree.flatten(params)
    sent = structure.unflatten(map(_to_sendable, leaves))
    received = jax.tree.leaves(broadcast(sent, root_rank, name, process_set))
    return structure.unflatten(
        _restore_type(new, old) for new, old in zip(received, leaves, strict=True)
    )


def _to_sendable(leaf: Any) -> Any:
    """Return a random key as integers; return other leaves unchanged."""
    return jax.random.key_data(leaf) if is_random_key(leaf) else leaf


def _restore_type(received: Any, leaf: Any) -> Any:
    """Return the received value as a random key or a Python number, if the leaf is one."""
    if is_random_key(leaf):
        return jax.random.wrap_key_data(received, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(received.item())
    return received


def is_random_key(leaf: Any) -> bool:
    """Return whether the leaf is a random key of JAX's new style."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send one rank's Python object to all ranks.

    Args:
        obj: Object that can be pickled. The objects of ranks other than the root are ignored.
        root_rank: Rank whose object is sent. The default is 0.
        name: Name of the operation. By default it is `broadcast_object`.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        The root's object. On the root it is the same object that was passed.
    """
    primitive.wait_for_programs("broadcast_object")
    return objects.broadcast_object(obj, root_rank, name or "broadcast_object", set_id(process_set))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect a Python object from every rank.

    Args:
        obj: This rank's object, which can be pickled.
        name: Name of the operation. By default it is `allgather_object`.
        process_set: Ranks that take part. By default all ranks do.

    Returns:
        A list with the objects of all ranks, in the order of ranks.

    Examples:
        >>> hosts = hvd.allgather_object(socket.gethostname())
    """
    primitive.wait_for_programs("allgather_object")
    return objects.allgather_object(obj, name or "allgather_object", set_id(process_set))
