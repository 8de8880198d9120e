"""Converts JAX arrays to torch tensors and back, without copies in host memory.

The engine reads the memory of JAX's arrays. A result in host memory becomes a JAX array without a
copy. A result on a GPU is copied once, on the GPU, because torch and JAX each reuse memory in the
order of their own streams, which are not synchronised with each other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from horovod.engine.runtime import runtime


def is_tracer(value: Any) -> bool:
    """Return whether the value belongs to a program that JAX is tracing."""
    return isinstance(value, jax.core.Tracer)


def as_array(value: Any, where: str = "") -> Any:
    """Convert an array or a number to a JAX array.

    Args:
        value: The array or number.
        where: Its path in the user's tree, for messages; none by default.

    Returns:
        The JAX array.

    Raises:
        ValueError: The value is neither an array nor a number, or is on several devices.
    """
    if is_tracer(value):
        array = value
    elif isinstance(value, jax.Array):
        array = value
        check_one_device(array, where)
    else:
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"expected an array or a number{_at(where)}, not {type(value).__name__}"
            ) from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise ValueError(
            f"arrays of type {array.dtype} cannot be sent{_at(where)}: broadcast_parameters takes "
            "random keys, and jax.random.key_data makes integers of them"
        )
    return array


def check_one_device(array: jax.Array, where: str = "") -> None:
    """Raise ValueError if the array is spread over several devices, since a rank has one."""
    devices = array.sharding.device_set
    if len(devices) > 1:
        me = f"rank {runtime.topology.rank}" if runtime.is_initialized() else "this rank"
        raise ValueError(
            f"the array{_at(where)} is sharded over {len(devices)} devices on {me}, and a Horovod "
            "rank has one: start one rank per device and place arrays with jax.device_put(array, "
            "jax.local_devices()[0]), or use jax.shard_map without Horovod"
        )


def _at(where: str) -> str:
    """Return the part of a message that names a path."""
    return f" at {where}" if where else ""


def to_torch(array: jax.Array) -> torch.Tensor:
    """Wait until the array is computed, and return a view of its memory, which is read-only."""
    if device_of(array).platform != "cpu" and not _torch_has_gpus():
        array = jax.device_put(array, jax.local_devices(backend="cpu")[0])
    view: torch.Tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
    return view


def to_jax(tensor: torch.Tensor, like: jax.Array) -> jax.Array:
    """Return an array on the device of `like` with the values of a tensor no longer in use.

    In host memory the array takes over the tensor's memory.
    """
    device = device_of(like)
    if tensor.is_cpu and device.platform == "cpu":
        return jax.dlpack.from_dlpack(tensor.contiguous())
    if tensor.is_cpu:  # torch cannot use this device
        return jax.device_put(jax.dlpack.from_dlpack(tensor.contiguous()), device)
    # Copy into memory that JAX has allocated and does not use yet.
    array = jnp.empty(tuple(tensor.shape), like.dtype, device=device)
    to_torch(array).copy_(tensor)
    torch.cuda.current_stream(tensor.device).synchronize()
    return array


def device_of(array: jax.Array) -> Any:
    """Return the only device of an array."""
    (device,) = array.sharding.device_set
    return device


@functools.cache
def _torch_has_gpus() -> bool:
    return torch.cuda.is_available()
