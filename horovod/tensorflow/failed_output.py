"""Failing inside a graph with tf.errors.FailedPreconditionError, for `python_op`.

Of the exceptions of a Python function in a graph, TensorFlow makes InvalidArgumentError, if it is
a ValueError, or else UnknownError. But such a function may return the output of an op that runs
asynchronously, and if that op fails, TensorFlow takes its failure for the function's. So there is a
way to fail with any class that an op of TensorFlow fails with. The op used here looks for a
variable and fails with a text that ends in the variable's name, which can be anything. None of
TensorFlow's ops says what we want and fails with AbortedError.
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
    """The output of an op that failed with FailedPreconditionError and a text with `message`.

    None where TensorFlow no longer lets us.
    """
    if new_executor is not None:
        # Other errors than `message` are of no interest now. And a thread of its own has no device,
        # tape or executor of the user's.
        with contextlib.suppress(Exception), ThreadPoolExecutor(1) as thread:
            return thread.submit(_look_for_variable, message).result()
    return None


def _look_for_variable(message: str) -> tf.Tensor | None:
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
    """The handle of a variable that does not exist.

    TensorFlow would keep an op that makes handles of this name for good. So one op makes them all,
    and we change the name.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), shared_name="horovod")
    packed = TensorProto.FromString(tf.io.serialize_tensor(handle).numpy()).tensor_content
    start = next(place for place, byte in enumerate(packed) if byte < 0x80) + 1  # after the length
    renamed = ResourceHandleProto.FromString(packed[start:])
    renamed.name = name
    proto = TensorProto(dtype=tf.resource.as_datatype_enum, resource_handle_val=[renamed])
    proto.tensor_shape.SetInParent()  # a scalar
    return tf.io.parse_tensor(proto.SerializeToString(), tf.resource)
