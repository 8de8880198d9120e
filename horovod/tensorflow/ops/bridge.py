"""Connects TensorFlow and the engine: TF tensors as torch tensors, collectives as graph ops.

Every collective of this binding, and everything else that calls the engine, goes through `run`. The
engine reads TensorFlow's buffers and must not change them. TensorFlow takes over the memory of the
tensors that the engine returns; only results on a GPU are copied once, on the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any

import tensorflow as tf
import torch
from tensorflow.experimental import dlpack
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.tensorflow.ops.errors import InvalidArgumentError, graph_error, tensorflow_errors
from horovod.tensorflow.ops.python_op import python_op

# The functions that `run` calls: they take torch tensors and the operation's name, and return torch
# tensors.
Function = Callable[[list[torch.Tensor], "str | None"], Sequence[torch.Tensor]]
SourceLine = tuple[str, int]  # file, line

# A decorator for every function that scripts call inside a tf.function. Without it AutoGraph would
# rewrite the function, and everything that it calls, into code that is slow to make and to run.
without_autograph = tf.autograph.experimental.do_not_convert

INT32_SCALAR = tf.TensorSpec((), tf.int32)

# TensorFlow aborts the process when it is asked for the memory of a tensor of any other type.
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
_LIBRARIES = {"horovod", "tensorflow", "keras", "tf_keras"}
_ERRORS = (ValueError, HorovodInternalError, tf.errors.OpError)  # other errors are bugs


# The source line for which this thread calls the engine now.
_source_line: ContextVar[SourceLine | None] = ContextVar("source_line", default=None)


@without_autograph
def run(
    function: Function,
    inputs: Sequence[Any],
    like: Sequence[tf.TensorSpec],
    name: str | None = None,
    ignore_name_scope: bool = False,
    known_as: str | None = None,
) -> list[tf.Tensor]:
    """Call `function` on the inputs: at once when executing eagerly, else as one graph op.

    Args:
        function: Gets read-only torch views of the inputs and the operation's name, and returns new
            torch tensors. In a graph it is called each time the op runs.
        inputs: Tensors, variables, arrays or numbers.
        like: The types of the results, and their static shapes in a graph.
        name: The operation's name; in a graph TensorFlow makes it unique.
        ignore_name_scope: Whether the ranks leave out the graph's scopes from the op's name.
        known_as: The name that `function` gets in a graph; by default the op's name.

    Returns:
        The results, as TensorFlow tensors.
    """
    tensors = [as_tensor(value) for value in inputs]
    if not tf.executing_eagerly():
        return _add_op(function, tensors, like, name or "Horovod", ignore_name_scope, known_as)
    with tensorflow_errors():
        return _call(function, tensors, name, _line_of_script())


def wait(request: Request) -> Any:
    """Wait for a request that a function of `run` has made, and return its result.

    Messages about the request name the line of the user's script that asked for it.
    """
    request.source_line = _source_line.get() or request.source_line
    return request.wait()


def wire_name(op: tf.Operation, ignore_name_scope: bool) -> str:
    """Return the name by which the ranks match an op."""
    return str(op.name.rpartition("/")[2] if ignore_name_scope else op.name)


def as_tensor(value: Any) -> tf.Tensor:
    """Convert a variable, an array, a number or a list of numbers to a TensorFlow tensor."""
    tensor = value
    if not (isinstance(value, tf.Tensor) and tf.executing_eagerly()):
        try:
            tensor = tf.convert_to_tensor(value)  # in a function, also captures eager tensors
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError.with_message(f"not a tensor: {error}") from error
    if tensor.dtype not in _SENDABLE:
        raise InvalidArgumentError.with_message(
            f"tensors of type {tensor.dtype.name} cannot be sent"
        )
    return tensor


def to_torch(tensor: tf.Tensor) -> torch.Tensor:
    """Return a torch view of an eager tensor's memory, which must not be written to."""
    if _gpus_are_foreign():
        with tf.device("/CPU:0"):
            tensor = tf.identity(tensor)
    capsule = dlpack.to_dlpack(tensor)  # waits until TensorFlow has computed it
    if _gpu_numbers():
        _renumber(capsule, lambda number: _gpu_numbers()[number])
    view: torch.Tensor = torch.from_dlpack(capsule)  # type: ignore[attr-defined]
    return view


def to_tensorflow(tensor: torch.Tensor) -> tf.Tensor:
    """Return an eager tensor that takes over the memory of a torch tensor no longer in use."""
    capsule = torch.utils.dlpack.to_dlpack(_make_usable(tensor))  # type: ignore[attr-defined]
    if _gpu_numbers():
        _renumber(capsule, _gpu_numbers().index)
    return dlpack.from_dlpack(capsule)


def _make_usable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if TensorFlow could not compute on its memory."""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def read_variables(variables: Sequence[Any]) -> list[torch.Tensor]:
    """Return eager variables, also Keras's, as torch views of their memory."""
    with tf.device("CPU:0"):  # copies only tensors on other devices
        return [to_torch(tf.identity(variable)) for variable in variables]


def write_variables(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    """Assign values to eager variables, which take over the values' memory."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(to_tensorflow(value))


def is_compiled_by_xla() -> bool:
    """Return whether XLA will compile the graph that is being built; it cannot contain our ops."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def device_scope(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a scope for ops that the user wants on `device`; an empty string means any device."""
    return tf.device(device) if device else contextlib.nullcontext()


def _call(
    function: Function,
    tensors: Sequence[tf.Tensor],
    name: str | None,
    source_line: SourceLine | None,
) -> list[tf.Tensor]:
    sources = [to_torch(tensor) for tensor in tensors]
    gpus = {source.device for source in sources if not source.is_cpu}
    token = _source_line.set(source_line)
    try:
        if gpus:
            return _call_on_gpu(function, sources, name, gpus)
        return [to_tensorflow(result) for result in function(sources, name)]
    finally:
        _source_line.reset(token)


def _call_on_gpu(
    function: Function, sources: list[torch.Tensor], name: str | None, gpus: set[torch.device]
) -> list[tf.Tensor]:
    """Call the function on sources of which one is on a GPU; move each result to its source's.

    TensorFlow and torch each reuse memory in the order of their own streams, which are not
    synchronised with each other. So neither may get memory back while the other still works on it.
    TensorFlow gets copies of the results: it would free a result's memory, for torch to use again,
    while its own kernels have yet to read it.
    """
    _synchronize(gpus)
    inputs = sources
    if len({source.device for source in sources}) > 1:  # TensorFlow keeps integers in host memory
        home = min(gpus, key=str)
        inputs = [source.to(home) for source in sources]  # the engine takes one device at a time
    results = [
        _make_usable(result.to(source.device))
        for result, source in zip(function(inputs, name), sources, strict=True)
    ]
    _synchronize(gpus)
    outputs = [to_tensorflow(result) for result in results]
    lent = [index for index, result in enumerate(results) if not result.is_cpu]
    for gpu in {outputs[index].backing_device for index in lent}:
        with tf.device(gpu):
            for index in lent:
                if outputs[index].backing_device == gpu:
                    outputs[index] = tf.raw_ops.Snapshot(input=outputs[index])
    _synchronize(gpus)  # the copies must be complete before torch gets its memory back
    return outputs


def _synchronize(gpus: set[torch.device]) -> None:
    """Wait for all streams of these devices, TensorFlow's and torch's."""
    for gpu in gpus:
        torch.get_device_module(gpu).synchronize(gpu)


def _add_op(
    function: Function,
    tensors: Sequence[tf.Tensor],
    like: Sequence[tf.TensorSpec],
    name: str,
    ignore_name_scope: bool,
    known_as: str | None,
) -> list[tf.Tensor]:
    if is_compiled_by_xla():
        raise InvalidArgumentError.with_message(
            "Horovod's collectives cannot be compiled by XLA: set jit_compile=False, in "
            "model.compile() or tf.function(), for the step that calls them."
        )
    source_line: SourceLine | None = None

    def body(*values: tf.Tensor) -> list[tf.Tensor]:
        was_initialised = runtime.is_initialized()
        try:
            return _call(function, values, known_as, source_line)
        except _ERRORS as error:
            # TensorFlow shows only the text, so a cause would be lost.
            raise graph_error(error, was_initialised) from None

    with device_scope("/CPU:0" if _gpus_are_foreign() else ""):
        outputs = python_op(body, tensors, like, name)
    op = outputs[0].op
    known_as = known_as or wire_name(op, ignore_name_scope)
    source_line = _line_of_op(op)
    return outputs


def _line_of_script() -> SourceLine:
    """Return the innermost line on the stack that does not belong to a library."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and (
        str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _line_of_op(op: tf.Operation) -> SourceLine | None:
    """Return the line for a graph op, in the script as it was before AutoGraph rewrote it."""
    modules = [sys.modules.get(name) for name in _LIBRARIES]
    files = [module.__file__ for module in modules if module is not None and module.__file__]
    folders = tuple(os.path.join(os.path.dirname(file), "") for file in files)
    for entry in reversed(op.traceback or []):
        if not entry.filename.startswith(folders):
            return entry.filename, entry.lineno
    return None


@functools.cache
def _gpus_are_foreign() -> bool:
    """Return whether TensorFlow has GPUs whose memory this torch cannot use."""
    return bool(tf.config.list_physical_devices("GPU")) and not torch.cuda.is_available()


@functools.cache
def _gpu_numbers() -> list[int]:
    """Return torch's number for each of TensorFlow's GPUs; an empty list if all are the same.

    TensorFlow counts only the GPUs that the script made visible, and counts each logical part of a
    GPU that was split.
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
    # A DLTensor begins with the address of the data (8 bytes), the device's type and its number.
    device = (ctypes.c_int32 * 2).from_address(_capsule_memory(capsule, b"dltensor") + 8)
    if device[0] != _DLPACK_CPU:
        device[1] = translate(device[1])
