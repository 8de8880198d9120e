"""Converts MXNet arrays to torch tensors and back, and the engine's errors to MXNet's.

Arrays in host memory are not copied. MXNet computes in the background; asking for the memory of an
array waits until it may be read or written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
import torch

from horovod.common.exceptions import HorovodInternalError

# The types of MXNet's contexts in host memory.
_HOST = ("cpu", "cpu_pinned", "cpu_shared")


class CollectiveError(mx.base.MXNetError, HorovodInternalError):
    """A collective failed, on all ranks that took part."""


class ArgumentError(mx.base.MXNetError, ValueError):
    """An argument is wrong; nothing was sent."""


@contextlib.contextmanager
def mxnet_errors() -> Iterator[None]:
    """Raise the engine's errors as classes that also derive from MXNet's error."""
    try:
        yield
    except mx.base.MXNetError:
        raise
    except HorovodInternalError as error:
        raise CollectiveError(str(error)) from error
    except ValueError as error:
        raise ArgumentError(str(error)) from error


def check_array(value: Any) -> Any:
    """Return the value; ValueError if it is not an NDArray, or is sparse."""
    if not isinstance(value, mx.nd.NDArray):
        raise ValueError(f"expected an mxnet NDArray, not {type(value).__name__}")
    if value.stype != "default":
        raise ValueError(f"expected a dense array, not one of storage type {value.stype!r}")
    return value


def check_one_device(arrays: Sequence[Any], name: str) -> Sequence[Any]:
    """Return the arrays of a parameter, one for each device; ValueError if there are several."""
    if len(arrays) > 1:
        raise ValueError(
            f"the parameter {name!r} is on {len(arrays)} devices, and a Horovod rank has one: "
            "initialise the model with one context"
        )
    return arrays


def to_torch(array: Any, write: bool = False) -> torch.Tensor:
    """Return a view of an array's memory, which may be written to if `write` is set.

    An array on a GPU is copied to the host, because torch cannot wait for MXNet's streams.
    """
    plain = check_array(array)
    if plain.context.device_type not in _HOST:
        plain = plain.as_in_context(mx.cpu())
    capsule = plain.to_dlpack_for_write() if write else plain.to_dlpack_for_read()
    view: torch.Tensor = torch.from_dlpack(capsule)  # type: ignore[attr-defined]
    return view


def to_mxnet(tensor: torch.Tensor, like: Any) -> Any:
    """Return an array on the device of `like`; in host memory it takes over the tensor's memory."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)  # MXNet's arrays have at least one dimension
    capsule = torch.utils.dlpack.to_dlpack(tensor.contiguous())  # type: ignore[attr-defined]
    array = mx.nd.from_dlpack(capsule)
    if like.context.device_type not in _HOST:
        array = array.as_in_context(like.context)
    return array.as_np_ndarray() if _is_numpy(like) else array


def write_back(array: Any, tensor: torch.Tensor) -> None:
    """Copy a result into the user's array, unless the two share their memory."""
    if array.context.device_type not in _HOST:
        to_mxnet(tensor, array).copyto(array)


def _is_numpy(array: Any) -> bool:
    return hasattr(mx, "np") and isinstance(array, mx.np.ndarray)
