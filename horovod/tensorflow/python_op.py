"""Graph ops that call Python and block, for `bridge`.

The op is tf.py_function's. That one also prepares for gradients of TensorFlow ops inside it: it
may keep the last call's inputs and outputs, and it converts every result. Ours have their gradients
elsewhere and return tensors, so the wrapper is replaced by a bare one. Where TensorFlow no longer
lets us, it is tf.py_function itself, which does the same at a higher price.

A blocked op holds one of TensorFlow's inter-op threads. In a function that is harmless: functions
run stateful ops one after another, in the order of the program, so every rank waits for the same
one. A v1 graph runs them in any order, and functions of several threads run at once: if the ranks'
few threads were held by different ops, nobody could go on. There the op gets a thread of its own,
which makes it about 0.2 ms slower. What remains is a function that was traced in the main thread
and then called in others: no more of those may wait at the same time than there are inter-op
threads (tf.config.threading.set_inter_op_parallelism_threads).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.tensorflow.failed_output import failed_output

try:
    from tensorflow.python.eager.context import is_async
    from tensorflow.python.ops.gen_script_ops import eager_py_func
    from tensorflow.python.ops.script_ops import EagerFunc, _py_funcs
except ImportError:
    EagerFunc = object
    _py_funcs = None

Body = Callable[..., list[tf.Tensor]]


def python_op(
    body: Body,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Any],
    name: str,
) -> list[tf.Tensor]:
    """An op of the current graph that calls `body` with eager tensors each time it runs.

    When `body` raises a ValueError the op fails with tf.errors.InvalidArgumentError, and when it
    raises a tf.errors.FailedPreconditionError with that, where TensorFlow lets us; with anything
    else the op fails with tf.errors.UnknownError.
    """
    one_by_one = (
        tf.compat.v1.get_default_graph().building_function
        and threading.current_thread() is threading.main_thread()
    )
    if one_by_one or tf.config.get_visible_devices("GPU"):  # other ops would leave the GPU
        outputs = _op(body, inputs, dtypes, name)
        for output, shape in zip(outputs, shapes, strict=True):
            output.set_shape(shape)
        return outputs
    return _op_with_thread(body, inputs, dtypes, shapes, name)


def _op(
    body: Body, inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], name: str | None = None
) -> list[tf.Tensor]:
    if _py_funcs is None:
        return list(tf.py_function(body, inputs, list(dtypes), name=name))
    bare = _Bare(body, list(dtypes))
    token = _py_funcs.insert(bare)  # which holds it weakly
    _keep(bare)
    return list(
        eager_py_func(input=inputs, token=token, is_async=is_async(), Tout=list(dtypes), name=name)
    )


class _Bare(EagerFunc):
    """What TensorFlow calls when the op runs."""

    def __init__(self, body: Body, dtypes: list[tf.DType]) -> None:
        super().__init__(body, dtypes, False)
        self._body = body

    def __call__(self, device: str | None, token: Any, args: Sequence[tf.Tensor]) -> Any:
        try:
            if device is None or "CPU" in device:
                return self._body(*args)
            return self._call(device, args)  # which brings results to the device
        except tf.errors.FailedPreconditionError as error:
            output = failed_output(error.message)
            if output is None:
                raise
            return [output] * len(self._out_dtypes)


def _keep(bare: _Bare) -> None:
    """Hold on to a body for as long as TensorFlow may call it.

    That is as long as the outermost graph lives: ops get copied from function to function.
    """
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    if not hasattr(graph, "_horovod_bodies"):
        graph._horovod_bodies = []
    graph._horovod_bodies.append(bare)


def _op_with_thread(
    body: Body,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Any],
    name: str,
) -> list[tf.Tensor]:
    """The same on a thread of its own: a dataset of one element, made by calling `body`."""
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    function = tf.function(
        lambda *values: _op(body, values[: len(inputs)], dtypes), autograph=False
    )
    types = {"output_types": list(dtypes), "output_shapes": [tf.TensorShape(s) for s in shapes]}
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
