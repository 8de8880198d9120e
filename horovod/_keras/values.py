"""Collectives on single values: numbers, arrays and tensors of whatever backend.

`horovod.tensorflow.keras` and `horovod.keras` export them with their signatures. Results are there
at once, as tensors of the backend; in a v1 graph of TensorFlow the session is asked for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from horovod._keras.arrays import to_numpy, to_torch
from horovod.common.reduce_op import ReduceOp
from horovod.torch import mpi_ops


def allreduce(
    backend: str,
    value: Any,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    compression: Any,
) -> Any:
    arguments = {
        "name": name,
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "compression": compression,
    }
    return _run(backend, "allreduce", value, **arguments)


def allgather(backend: str, value: Any, name: str | None) -> Any:
    return _run(backend, "allgather", value, name=name)


def broadcast(backend: str, value: Any, root_rank: int, name: str | None) -> Any:
    return _run(backend, "broadcast", value, root_rank=root_rank, name=name)


def reducescatter(backend: str, value: Any, name: str | None, op: ReduceOp) -> Any:
    return _run(backend, "reducescatter", value, name=name, op=op)


def broadcast_global_variables(backend: str, root_rank: int) -> Any:
    """In a v1 graph of TensorFlow: give all global variables the root's values."""
    if backend == "tensorflow":
        from horovod.tensorflow.functions import broadcast_global_variables as broadcast_all

        return _evaluated(broadcast_all(root_rank))
    raise RuntimeError(
        f"Keras on {backend} has no list of all variables: pass "
        "BroadcastGlobalVariablesCallback(root_rank) to fit()"
    )


def _run(backend: str, name_of_function: str, value: Any, **arguments: Any) -> Any:
    if backend == "tensorflow":
        from horovod.tensorflow import mpi_ops as tensorflow_ops

        return _evaluated(getattr(tensorflow_ops, name_of_function)(value, **arguments))
    function: Callable[..., torch.Tensor] = getattr(mpi_ops, name_of_function)
    from keras import ops

    tensor = ops.convert_to_tensor(value)
    if backend == "torch":
        return function(tensor.detach(), **arguments)
    array = np.array(ops.convert_to_numpy(tensor), order="C")
    return ops.convert_to_tensor(to_numpy(function(to_torch(array), **arguments), like=array))


def _evaluated(result: Any) -> Any:
    import tensorflow as tf

    if tf.executing_eagerly():
        return result
    return tf.compat.v1.keras.backend.get_session().run(result)
