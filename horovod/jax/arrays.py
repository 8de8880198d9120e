"""JAX arrays as torch tensors and back, without copying in host memory.

What JAX has computed is read where it is. A result in host memory becomes a JAX array as it is; on
a GPU it is copied once, there, because torch and JAX each use their memory again in the order of
their own streams, which know nothing of each other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from horovod.engine.runtime import runtime


def is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def as_array(value: Any, where: str = "") -> Any:
    """A JAX array of an array or a number; ValueError where it is neither, or on several devices.

    `where`: its path in the tree it is from.
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
    """ValueError if the array is spread over devices: a rank has one."""
    devices = array.sharding.device_set
    if len(devices) > 1:
        me = f"rank {runtime.topology.rank}" if runtime.is_initialized() else "this rank"
        raise ValueError(
            f"the array{_at(where)} is sharded over {len(devices)} devices on {me}, and a Horovod "
            "rank has one: start one rank per device and place arrays with jax.device_put(array, "
            "jax.local_devices()[0]), or use jax.shard_map without Horovod"
        )


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def to_torch(array: jax.Array) -> torch.Tensor:
    """A view of an array's memory, which must not be written to. Waits until it is computed."""
    if device_of(array).platform != "cpu" and not _torch_has_gpus():
        array = jax.device_put(array, jax.local_devices(backend="cpu")[0])
    view: torch.Tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
    return view


def to_jax(tensor: torch.Tensor, like: jax.Array) -> jax.Array:
    """An array on the device of `like` that takes over the tensor's memory, in host memory.

    torch must be done with the tensor.
    """
    device = device_of(like)
    if tensor.is_cpu and device.platform == "cpu":
        return jax.dlpack.from_dlpack(tensor.contiguous())
    if tensor.is_cpu:  # torch cannot use this device
        return jax.device_put(jax.dlpack.from_dlpack(tensor.contiguous()), device)
    # Memory of JAX's own, which nobody else has seen yet.
    array = jnp.empty(tuple(tensor.shape), like.dtype, device=device)
    to_torch(array).copy_(tensor)
    torch.cuda.current_stream(tensor.device).synchronize()
    return array


def device_of(array: jax.Array) -> Any:
    """The one device of an array."""
    (device,) = array.sharding.device_set
    return device


@functools.cache
def _torch_has_gpus() -> bool:
    return torch.cuda.is_available()
