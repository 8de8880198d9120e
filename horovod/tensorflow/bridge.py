"""Between TensorFlow and the engine: TF tensors as torch tensors, and collectives as graph ops.

Every collective of this binding, and whatever else talks to the engine, goes through `run`. The
engine reads TensorFlow's buffers, which it must not change, and TensorFlow takes over the tensors
that the engine returns; only what is on a GPU is copied once, there, on its way back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from tensorflow.experimental import dlpack
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.tensorflow.errors import InvalidArgumentError, eager_error, graph_error
from horovod.tensorflow.python_op import python_op
from horovod.tensorflow.source_lines import Place, line_of_op, line_of_script

# What `run` calls: torch tensors and the operation's name in, torch tensors out.
Function = Callable[[list[torch.Tensor], "str | None"], Sequence[torch.Tensor]]

# For every function that scripts call inside a tf.function: AutoGraph would rewrite it, and all
# that it calls, into code that is slow to make and slow to run.
unconverted = tf.autograph.experimental.do_not_convert

# TensorFlow aborts the process when asked for the memory of anything else.
_SENDABLE = frozenset(
    {
        tf.bool,
        *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        *(tf.int8, tf.int16, tf.int32, tf.int64),
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
        *(tf.complex64, tf.complex128),
    }
)
_ALIGNMENT = 64  # bytes; TensorFlow's kernels abort the process on anything less
_DLPACK_CPU = 1  # the type of device, in DLPack's numbering
_ERRORS = (ValueError, HorovodInternalError, tf.errors.OpError)  # other errors are bugs


class _Calling(threading.local):
    """What a thread's call of the engine is for."""

    place: Place | None = None


_calling = _Calling()


@unconverted
def run(
    function: Function,
    inputs: Sequence[Any],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    known_as: str | None = None,
) -> list[tf.Tensor]:
    """Call `function` on the inputs: at once when executing eagerly, else as one graph op.

    `function(tensors, name)` gets read-only torch views of the inputs and returns new torch
    tensors of `dtypes`. In a graph it runs whenever the op does; the outputs' static shapes are
    then `shapes`, and its name is `known_as` or else the op's, which the graph makes unique,
    without scopes if `ignore_name_scope`.
    """
    tensors = [as_tensor(value) for value in inputs]
    if not tf.executing_eagerly():
        return _add_op(
            function, tensors, dtypes, shapes, name or "Horovod", ignore_name_scope, known_as
        )
    was_initialised = runtime.is_initialized()
    try:
        return _call(function, tensors, name, line_of_script())
    except _ERRORS as error:
        raise eager_error(error, was_initialised) from error


def wait(request: Request) -> Any:
    """The result of a request that a function of `run` made.

    Messages about it name the line of the user's script that asked for it.
    """
    if _calling.place is not None:
        request.source_line = _calling.place
    return request.wait()


def wire_name(op: tf.Operation, ignore_name_scope: bool) -> str:
    """What the ranks know an op by."""
    return str(op.name.rpartition("/")[2] if ignore_name_scope else op.name)


def as_tensor(value: Any) -> tf.Tensor:
    """A TensorFlow tensor of a variable, an array, a number or a list of numbers."""
    tensor = value
    if not (isinstance(value, tf.Tensor) and tf.executing_eagerly()):
        try:
            tensor = tf.convert_to_tensor(value)  # in a function, also captures eager tensors
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError.because(f"not a tensor: {error}") from error
    if tensor.dtype not in _SENDABLE:
        raise InvalidArgumentError.because(f"tensors of type {tensor.dtype.name} cannot be sent")
    return tensor


def to_torch(tensor: tf.Tensor) -> torch.Tensor:
    """A view of an eager tensor's memory, which must not be written to."""
    if _gpus_are_foreign():
        with tf.device("/CPU:0"):
            tensor = tf.identity(tensor)
    capsule = dlpack.to_dlpack(tensor)  # waits until TensorFlow has computed it
    if _gpu_numbers():
        _renumber(capsule, lambda number: _gpu_numbers()[number])
    view: torch.Tensor = torch.from_dlpack(capsule)  # type: ignore[attr-defined]
    return view


def to_tensorflow(tensor: torch.Tensor) -> tf.Tensor:
    """An eager tensor that takes over a torch tensor's memory, which torch must be done with."""
    capsule = torch.utils.dlpack.to_dlpack(_computable(tensor))  # type: ignore[attr-defined]
    if _gpu_numbers():
        _renumber(capsule, _gpu_numbers().index)
    return dlpack.from_dlpack(capsule)


def _computable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if TensorFlow could not compute on its memory."""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def is_compiled_by_xla() -> bool:
    """Whether what is being built will be: no op of ours can be part of that."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def placed(device: str) -> contextlib.AbstractContextManager[Any]:
    """The scope for ops that the user wants on `device`; an empty string means anywhere."""
    return tf.device(device) if device else contextlib.nullcontext()


def _call(
    function: Function, tensors: Sequence[tf.Tensor], name: str | None, place: Place | None
) -> list[tf.Tensor]:
    sources = [to_torch(tensor) for tensor in tensors]
    gpus = {source.device for source in sources if not source.is_cpu}
    outer, _calling.place = _calling.place, place
    try:
        if gpus:
            return _call_on_gpu(function, sources, name, gpus)
        return [to_tensorflow(result) for result in function(sources, name)]
    finally:
        _calling.place = outer


def _call_on_gpu(
    function: Function, sources: list[torch.Tensor], name: str | None, gpus: set[torch.device]
) -> list[tf.Tensor]:
    """The same where a source is on a GPU; every result goes where the source in its place is.

    TensorFlow and torch each use their memory again in the order of their own streams, which know
    nothing of each other. So neither may get memory back while the other still works on it, and
    TensorFlow keeps copies: it would let go of a result that its kernels have yet to read.
    """
    _synchronize(gpus)
    gathered = sources
    if len({source.device for source in sources}) > 1:  # such as integers, kept in host memory
        home = min(gpus, key=str)
        gathered = [source.to(home) for source in sources]  # the engine takes one device at a time
    results = [
        _computable(result.to(source.device))
        for result, source in zip(function(gathered, name), sources, strict=True)
    ]
    _synchronize(gpus)
    kept = [to_tensorflow(result) for result in results]
    lent = [place for place, result in enumerate(results) if not result.is_cpu]
    for gpu in {kept[place].backing_device for place in lent}:
        with tf.device(gpu):
            for place in lent:
                if kept[place].backing_device == gpu:
                    kept[place] = tf.raw_ops.Snapshot(input=kept[place])
    _synchronize(gpus)  # before torch gets back what it lent
    return kept


def _synchronize(gpus: set[torch.device]) -> None:
    """Wait for all streams of these devices, TensorFlow's and torch's."""
    for gpu in gpus:
        torch.get_device_module(gpu).synchronize(gpu)


def _add_op(
    function: Function,
    tensors: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Any],
    name: str,
    ignore_name_scope: bool,
    known_as: str | None,
) -> list[tf.Tensor]:
    if is_compiled_by_xla():
        raise InvalidArgumentError.because(
            "Horovod's collectives cannot be compiled by XLA: set jit_compile=False, in "
            "model.compile() or tf.function(), for the step that calls them."
        )
    place: Place | None = None

    def body(*values: tf.Tensor) -> list[tf.Tensor]:
        was_initialised = runtime.is_initialized()
        try:
            return _call(function, values, known_as, place)
        except _ERRORS as error:
            # All that TensorFlow shows is text.
            raise graph_error(error, was_initialised) from None

    with placed("/CPU:0" if _gpus_are_foreign() else ""):
        outputs = python_op(body, tensors, dtypes, shapes, name)
    op = outputs[0].op
    known_as = known_as or wire_name(op, ignore_name_scope)
    place = line_of_op(op)
    return outputs


@functools.cache
def _gpus_are_foreign() -> bool:
    """Whether TensorFlow has GPUs whose memory our torch cannot use."""
    return bool(tf.config.list_physical_devices("GPU")) and not torch.cuda.is_available()


@functools.cache
def _gpu_numbers() -> list[int]:
    """The number that torch knows each of TensorFlow's GPUs by, if any differs.

    TensorFlow counts only those that the script made visible, and each part that it split one into.
    """
    numbers: list[int] = []
    for gpu in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(gpu) or [gpu]
        numbers += [int(gpu.name.rpartition(":")[2])] * len(parts)
    return [] if numbers == list(range(len(numbers))) else numbers


_capsule_memory = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _renumber(capsule: Any, translate: Callable[[int], int]) -> None:
    """Change the number of the GPU that a DLPack capsule is on, if it is on one."""
    # What it holds begins with the address of the data, the type of device and its number.
    device = (ctypes.c_int32 * 2).from_address(_capsule_memory(capsule, b"dltensor") + 8)
    if device[0] != _DLPACK_CPU:
        device[1] = translate(device[1])
