"""Lets XLA call a Python function from a compiled program, by ctypes.

XLA's "foreign function interface" calls a C function wherever a compiled program has a custom call
with our name. ctypes makes such a C function from a Python one, so nothing has to be compiled.
`register` registers the function with XLA. The function gets a `Frame`, which knows where the
arguments and the results are in memory. The structures are those of ``xla/ffi/api/c_api.h``, which
is part of jaxlib. `horovod.jax.compiled.primitive` uses this module.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import jax
import torch

TARGET = "horovod_collective"

_METADATA = 1  # the extension by which XLA asks for the version that the function supports
_TOKEN = 17  # the type of tokens, which only order calls
_ABORTED = 10  # the error code of our errors

_DTYPES = {
    1: torch.bool,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.uint8,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.uint64,
    10: torch.float16,
    11: torch.float32,
    12: torch.float64,
    16: torch.bfloat16,
    15: torch.complex64,
    18: torch.complex128,
}


class _Extension(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("type", c_int), ("next", c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("ext", c_void_p), ("major", c_int), ("minor", c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", POINTER(_Metadata))]


class _Api(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("ext", c_void_p),
        ("version", _Version),
        ("internal", c_void_p),
        ("error_create", c_void_p),
        ("error_get_message", c_void_p),
        ("error_destroy", c_void_p),
        ("handler_register", c_void_p),
        ("stream_get", c_void_p),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("ext", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    ]


class _Buffers(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("ext", c_void_p),
        ("count", c_int64),
        ("types", POINTER(c_int)),
        ("items", POINTER(POINTER(_Buffer))),
    ]


class _Text(ctypes.Structure):
    _fields_ = [("start", c_void_p), ("length", c_size_t)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("ext", c_void_p),
        ("count", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(_Text))),
        ("values", POINTER(POINTER(_Text))),
    ]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("ext", POINTER(_Extension)),
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    ]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("ext", c_void_p), ("message", c_char_p), ("code", c_int)]


class _StreamArguments(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("ext", c_void_p), ("context", c_void_p), ("stream", c_void_p)]


_Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(_CallFrame))
_CreateError = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArguments))
_GetStream = ctypes.CFUNCTYPE(c_void_p, POINTER(_StreamArguments))

_handlers: list[Any] = []  # kept alive, because XLA may call them as long as the process lives


class Frame:
    """One call: its text, and the memory of its arguments and results as torch tensors."""

    def __init__(self, frame: Any, on_device: bool) -> None:
        self._frame = frame
        self._tensor = _device_tensor if on_device else _host_tensor

    @property
    def text(self) -> bytes:
        """The text that `horovod.jax.compiled.primitive` wrote into the program."""
        text = self._frame.attributes.values[0].contents
        return ctypes.string_at(text.start, text.length)

    @property
    def arguments(self) -> list[torch.Tensor]:
        return self._tensors(self._frame.arguments)

    @property
    def results(self) -> list[torch.Tensor]:
        return self._tensors(self._frame.results)

    @property
    def stream(self) -> int:
        """The CUDA stream that the program runs on."""
        arguments = _StreamArguments(ctypes.sizeof(_StreamArguments), None, self._frame.context)
        _GetStream(self._frame.api.contents.stream_get)(ctypes.byref(arguments))
        return arguments.stream or 0

    def _tensors(self, buffers: Any) -> list[torch.Tensor]:
        items = [buffers.items[index].contents for index in range(buffers.count)]
        return [self._tensor(item) for item in items if item.dtype != _TOKEN]


def _host_tensor(buffer: Any) -> torch.Tensor:
    dtype, shape, nbytes = _form(buffer)
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * nbytes).from_address(buffer.data)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class _DeviceMemory:
    """Memory on a CUDA device, in the interface by which torch accepts foreign arrays."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _device_tensor(buffer: Any) -> torch.Tensor:
    dtype, shape, nbytes = _form(buffer)
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cuda")
    memory = torch.as_tensor(_DeviceMemory(buffer.data, nbytes), device="cuda")
    return memory.view(dtype).view(shape)


def _form(buffer: Any) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return the type, the shape and the size in bytes of a buffer."""
    dtype = _DTYPES[buffer.dtype]
    shape = tuple(buffer.dims[: buffer.rank])
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return dtype, shape, nbytes


def register(platform: str, function: Callable[[Frame], None]) -> None:
    """Let XLA call `function` for custom calls of `TARGET`.

    An exception of the function makes the program fail with the exception's class and text.

    Args:
        platform: "cpu" or "CUDA": which programs call this function.
        function: A function that takes the frame of a call.
    """

    def handler(pointer: Any) -> Any:
        frame = pointer.contents
        if frame.ext and frame.ext.contents.type == _METADATA:
            _describe(frame)
            return None
        try:
            function(Frame(frame, platform == "CUDA"))
        except BaseException as error:  # ctypes cannot pass an exception on to XLA
            return _failure(frame, error)
        return None

    c_handler = _Handler(handler)
    _handlers.append(c_handler)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(c_handler), platform=platform)


def _describe(frame: Any) -> None:
    """Tell XLA that we support its version of the interface.

    The parts that we use have been the same in all versions.
    """
    extension = ctypes.cast(frame.ext, POINTER(_MetadataExtension)).contents
    metadata = extension.metadata.contents
    metadata.version.major = frame.api.contents.version.major
    metadata.version.minor = frame.api.contents.version.minor
    metadata.traits = 0  # in particular not the trait that allows the call in a CUDA graph


def _failure(frame: Any, error: BaseException) -> Any:
    """Return XLA's error object for an exception."""
    if isinstance(error, (RuntimeError, ValueError, NotImplementedError)):
        message = f"{type(error).__name__}: {error}"
    else:
        message = "".join(traceback.format_exception(error))
    arguments = _ErrorArguments(
        ctypes.sizeof(_ErrorArguments), None, message.encode().replace(b"\0", b""), _ABORTED
    )
    return _CreateError(frame.api.contents.error_create)(ctypes.byref(arguments))
