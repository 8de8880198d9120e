"""MXNet arrays as torch tensors and back, without copying in host memory, and errors as MXNet's.

MXNet computes in the background: asking for the memory of an array waits until it may be read, or
written to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mxnet as mx
import torch

from horovod.common.exceptions import HorovodInternalError

# MXNet's CPU contexts, as its arrays name them.
_HOST = ("cpu", "cpu_pinned", "cpu_shared")


class CollectiveError(mx.base.MXNetError, HorovodInternalError):
    """A collective failed, on all ranks that took part."""


class ArgumentError(mx.base.MXNetError, ValueError):
    """A wrong argument, found before anything was sent."""


@contextlib.contextmanager
def mxnet_errors() -> Iterator[None]:
    """Raise the engine's errors as MXNet's, and as what they are."""
    try:
        yield
    except mx.base.MXNetError:
        raise
    except HorovodInternalError as error:
        raise CollectiveError(str(error)) from error
    except ValueError as error:
        raise ArgumentError(str(error)) from error


def check_array(value: Any) -> Any:
    """The NDArray itself; ValueError if it is none, or sparse."""
    if not isinstance(value, mx.nd.NDArray):
        raise ValueError(f"expected an mxnet NDArray, not {type(value).__name__}")
    if value.stype != "default":
        raise ValueError(f"expected a dense array, not one of storage type {value.stype!r}")
    return value


def to_torch(array: Any, write: bool = False) -> torch.Tensor:
    """A view of an array's memory, which may be written to with `write`.

    An array of a GPU is copied to the host: MXNet's streams are its own.
    """
    plain = check_array(array)
    if plain.context.device_type not in _HOST:
        plain = plain.as_in_context(mx.cpu())
    capsule = plain.to_dlpack_for_write() if write else plain.to_dlpack_for_read()
    view: torch.Tensor = torch.from_dlpack(capsule)  # type: ignore[attr-defined]
    return view


def to_mxnet(tensor: torch.Tensor, like: Any) -> Any:
    """An array on the device of `like` that takes over the tensor's memory, in host memory."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)  # MXNet's arrays have at least one dimension
    capsule = torch.utils.dlpack.to_dlpack(tensor.contiguous())  # type: ignore[attr-defined]
    array = mx.nd.from_dlpack(capsule)
    if like.context.device_type not in _HOST:
        array = array.as_in_context(like.context)
    return array.as_np_ndarray() if _is_numpy(like) else array


def write_back(array: Any, tensor: torch.Tensor) -> None:
    """Bring a result into the user's array, unless its memory is the tensor's."""
    if array.context.device_type not in _HOST:
        to_mxnet(tensor, array).copyto(array)


def _is_numpy(array: Any) -> bool:
    return hasattr(mx, "np") and isinstance(array, mx.np.ndarray)
