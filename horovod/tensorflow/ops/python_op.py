"""Graph ops that call Python and block, for `bridge`.

The op is that of tf.py_function. The wrapper of tf.py_function also prepares for gradients of
TensorFlow ops inside the function: it may keep the inputs and outputs of the last call, and it
converts every result. Our functions have their gradients elsewhere and return tensors, so we use a
bare wrapper. Where TensorFlow lacks the private names that this needs, we use tf.py_function
itself, which is slower.

A blocked op holds one of TensorFlow's inter-op threads. In a function that is harmless: functions
run stateful ops one after another, in the order of the program, so every rank waits for the same
op. A v1 graph runs ops in any order, and functions of several threads run at the same time. If
different ops held the few threads of different ranks, no rank could proceed. So in these cases the
op gets a thread of its own, which costs about 0.2 ms. One case remains: a function that was traced
in the main thread and is called in other threads. No more of those calls may wait at the same time
than there are inter-op threads (tf.config.threading.set_inter_op_parallelism_threads).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

try:
    from tensorflow.python.eager.context import is_async
    from tensorflow.python.ops.gen_script_ops import eager_py_func
    from tensorflow.python.ops.script_ops import EagerFunc, _py_funcs
except ImportError:
    EagerFunc = object
    _py_funcs = None

try:
    from tensorflow.core.framework.resource_handle_pb2 import ResourceHandleProto
    from tensorflow.core.framework.tensor_pb2 import TensorProto
    from tensorflow.python.eager.context import context, eager_mode
    from tensorflow.python.eager.execute import quick_execute
    from tensorflow.python.eager.executor import new_executor
except ImportError:
    new_executor = None

Body = Callable[..., list[tf.Tensor]]


def python_op(
    body: Body, inputs: Sequence[tf.Tensor], like: Sequence[tf.TensorSpec], name: str
) -> list[tf.Tensor]:
    """Add an op to the current graph that calls `body` with eager tensors each time it runs.

    If `body` raises a ValueError, the op fails with tf.errors.InvalidArgumentError. If it raises a
    tf.errors.FailedPreconditionError, the op fails with that class, where TensorFlow makes this
    possible. With all other errors the op fails with tf.errors.UnknownError.
    """
    runs_in_order = (
        tf.compat.v1.get_default_graph().building_function
        and threading.current_thread() is threading.main_thread()
    )
    # With a GPU there is no choice: the ops with a thread of their own run on the CPU.
    if runs_in_order or tf.config.get_visible_devices("GPU"):
        outputs = _op(body, inputs, [spec.dtype for spec in like], name)
        for output, spec in zip(outputs, like, strict=True):
            output.set_shape(spec.shape)
        return outputs
    return _op_with_thread(body, inputs, like, name)


def _op(
    body: Body, inputs: Sequence[tf.Tensor], dtypes: list[tf.DType], name: str | None = None
) -> list[tf.Tensor]:
    """Add the op of tf.py_function with our bare wrapper."""
    if _py_funcs is None:
        return list(tf.py_function(body, inputs, dtypes, name=name))
    bare = _BareFunction(body, dtypes)
    token = _py_funcs.insert(bare)  # keeps only a weak reference
    _keep(bare)
    return list(
        eager_py_func(input=inputs, token=token, is_async=is_async(), Tout=dtypes, name=name)
    )


class _BareFunction(EagerFunc):
    """The object that TensorFlow calls when the op runs."""

    def __init__(self, body: Body, dtypes: list[tf.DType]) -> None:
        super().__init__(body, dtypes, False)
        self._body = body

    def __call__(self, device: str | None, token: Any, args: Sequence[tf.Tensor]) -> Any:
        try:
            if device is None or "CPU" in device:
                return self._body(*args)
            return self._call(device, args)  # copies the results to the device
        except tf.errors.FailedPreconditionError as error:
            output = _failed_output(error.message)
            if output is None:
                raise
            return [output] * len(self._out_dtypes)


def _keep(bare: _BareFunction) -> None:
    """Keep a body alive for as long as TensorFlow may call it.

    That is as long as the outermost graph lives, because ops are copied from function to function.
    """
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    if not hasattr(graph, "_horovod_bodies"):
        graph._horovod_bodies = []
    graph._horovod_bodies.append(bare)


def _op_with_thread(
    body: Body, inputs: Sequence[tf.Tensor], like: Sequence[tf.TensorSpec], name: str
) -> list[tf.Tensor]:
    """Add an op that calls `body` in a thread of its own.

    The op reads a dataset of one element, and TensorFlow computes that element in another thread.
    """
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    dtypes = [spec.dtype for spec in like]
    function = tf.function(
        lambda *values: _op(body, values[: len(inputs)], dtypes), autograph=False
    )
    types = {"output_types": dtypes, "output_shapes": [spec.shape for spec in like]}
    with tf.name_scope(f"{name}_thread"), tf.device("/CPU:0"):
        dataset = tf.raw_ops.TensorDataset(
            components=list(inputs) or [0], output_shapes=[spec.shape for spec in specs] or [()]
        )
        called = tf.raw_ops.MapDataset(
            input_dataset=dataset,
            other_arguments=[],
            f=function.get_concrete_function(*(specs or [tf.TensorSpec((), tf.int32)])),
            use_inter_op_parallelism=False,
            preserve_cardinality=True,
            **types,
        )
    with tf.device("/CPU:0"):
        return list(tf.raw_ops.DatasetToSingleElement(dataset=called, name=name, **types))


# -- failing with FailedPreconditionError ------------------------------------------------------


def _failed_output(message: str) -> tf.Tensor | None:
    """Return the output of an op that failed with FailedPreconditionError and `message`.

    TensorFlow turns the ValueError of a Python function in a graph into InvalidArgumentError, and
    all other exceptions into UnknownError. But such a function may return the output of an op that
    runs asynchronously, and if that op fails, TensorFlow treats its failure as the function's. The
    op used here looks for a variable; its error text ends in the variable's name, which can be any
    text. We know of no op that fails with AbortedError and a text of our choice.

    Return None if this TensorFlow lacks the private functions that it needs.
    """
    if new_executor is not None:
        # An error here must not hide `message`, so it is ignored. A separate thread does not have
        # the devices, tapes and executors that the user's thread may have set.
        with contextlib.suppress(Exception), ThreadPoolExecutor(1) as thread:
            return thread.submit(_look_for_variable, message).result()
    return None


def _look_for_variable(message: str) -> tf.Tensor | None:
    """Run an op that looks for a missing variable, and return its failed output."""
    with eager_mode(), tf.device("/CPU:0"):
        # The text is "... the following variables were found uninitialized: " and the name.
        variable = _missing_variable(f"none. The error is Horovod's:\n{message}")
        executor = new_executor(enable_async=True)
        context().executor = executor  # in this thread, until the executor is deleted
        attributes = ("N", 1, "dtypes", [tf.float32.as_datatype_enum])
        (output,) = quick_execute(b"_ReadVariablesOp", 1, [variable], attributes, context())
        try:
            executor.wait()
        except tf.errors.FailedPreconditionError:
            executor.clear_error()
            return output
    return None


def _missing_variable(name: str) -> tf.Tensor:
    """Return the handle of a variable that does not exist.

    TensorFlow keeps every op that makes a handle, with its name, until the process ends. So one op
    makes all handles, and the name is changed afterwards.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), shared_name="horovod")
    packed = TensorProto.FromString(tf.io.serialize_tensor(handle).numpy()).tensor_content
    start = next(index for index, byte in enumerate(packed) if byte < 0x80) + 1  # after the length
    renamed = ResourceHandleProto.FromString(packed[start:])
    renamed.name = name
    proto = TensorProto(dtype=tf.resource.as_datatype_enum, resource_handle_val=[renamed])
    proto.tensor_shape.SetInParent()  # a scalar
    return tf.io.parse_tensor(proto.SerializeToString(), tf.resource)
