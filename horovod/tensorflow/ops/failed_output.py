"""Lets `python_op` fail inside a graph with tf.errors.FailedPreconditionError.

TensorFlow turns the ValueError of a Python function in a graph into InvalidArgumentError, and all
other exceptions into UnknownError. But such a function may return the output of an op that runs
asynchronously. If that op fails, TensorFlow treats its failure as the function's. So the function
can fail with any error class of any op. The op used here looks for a variable, and its error text
ends in the variable's name, which can be any text. We know of no op that fails with AbortedError
and a text of our choice.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

try:
    from tensorflow.core.framework.resource_handle_pb2 import ResourceHandleProto
    from tensorflow.core.framework.tensor_pb2 import TensorProto
    from tensorflow.python.eager.context import context, eager_mode
    from tensorflow.python.eager.execute import quick_execute
    from tensorflow.python.eager.executor import new_executor
except ImportError:
    new_executor = None


def failed_output(message: str) -> tf.Tensor | None:
    """Return the output of an op that failed with FailedPreconditionError and `message`.

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
