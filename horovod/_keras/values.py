"""Collectives on single values: numbers, arrays and tensors of whatever backend.

`horovod.tensorflow.keras` and `horovod.keras` export them. Results are there
at once, as tensors of the backend; in a v1 graph of TensorFlow the session is asked for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from horovod._keras.arrays import to_numpy, to_torch
from horovod.common.compression import NoneCompressor
from horovod.common.reduce_op import ReduceOp
from horovod.common.util import resolve_reduce_op
from horovod.torch import mpi_ops


class Values:
    """The collectives for one backend."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def allreduce(
        self,
        value: Any,
        name: str | None = None,
        average: bool | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: ReduceOp | None = None,
        compression: Any = NoneCompressor,
    ) -> Any:
        """Reduce a number, array or tensor over all ranks.

        Args:
            value: Of the same shape and type on all ranks.
            name: Ranks match operations by name; left out, by the order of their calls.
            average: Older form of `op`: True for `Average`, False for `Sum`.
            prescale_factor: Multiplies tensors before the reduction.
            postscale_factor: Multiplies the result.
            op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
            compression: What travels in place of a tensor, such as `Compression.fp16`.
        """
        return _run(
            self._backend,
            "allreduce",
            value,
            name=name,
            op=resolve_reduce_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        )

    def allgather(self, value: Any, name: str | None = None) -> Any:
        """All ranks' `value`, concatenated along the first dimension.

        `name` is for the ranks to match operations by; left out, they match by order.
        """
        return _run(self._backend, "allgather", value, name=name)

    def broadcast(self, value: Any, root_rank: int, name: str | None = None) -> Any:
        """The `value` that `root_rank` has, on every rank.

        `name` is for the ranks to match operations by; left out, they match by order.
        """
        return _run(self._backend, "broadcast", value, root_rank=root_rank, name=name)

    def reducescatter(
        self, value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE
    ) -> Any:
        """This rank's share of the reduced `value`.

        `op` is `Average` or `Sum`. `name` is for the ranks to match operations by; left out, they
        match by order.
        """
        return _run(self._backend, "reducescatter", value, name=name, op=op)

    def broadcast_global_variables(self, root_rank: int) -> Any:
        """In a v1 graph of TensorFlow: give every rank the values that `root_rank` has of all
        global variables.

        RuntimeError elsewhere: there is no list of all variables.
        """
        if self._backend == "tensorflow":
            from horovod.tensorflow.functions import broadcast_global_variables as broadcast_all

            return _evaluated(broadcast_all(root_rank))
        raise RuntimeError(
            f"Keras on {self._backend} has no list of all variables: pass "
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
