"""Collectives on single values: numbers, arrays and tensors of any backend.

`horovod.tensorflow.keras` and `horovod.keras` export them. They return tensors of the backend; in a
v1 graph of TensorFlow they run the session to get the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from horovod._keras.variables import to_numpy, to_torch
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
            value: This rank's value, with the same shape and type on all ranks.
            name: Ranks match operations by this name; without one, by the order of their calls.
            average: Older form of `op`: True for `Average`, False for `Sum`.
            prescale_factor: A factor for tensors before the reduction; 1.0 by default.
            postscale_factor: A factor for the result; 1.0 by default.
            op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
            compression: A compressor for what is sent, such as `Compression.fp16`; none by default.

        Returns:
            The reduced value, as a tensor of the backend.
        """
        return self._run(
            "allreduce",
            value,
            name=name,
            op=resolve_reduce_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        )

    def allgather(self, value: Any, name: str | None = None) -> Any:
        """Concatenate the values of all ranks along the first dimension.

        Args:
            value: This rank's value; ranks may differ in the first dimension.
            name: Ranks match operations by this name; without one, by the order of their calls.

        Returns:
            The values of all ranks in the order of ranks, as a tensor of the backend.
        """
        return self._run("allgather", value, name=name)

    def broadcast(self, value: Any, root_rank: int, name: str | None = None) -> Any:
        """Give every rank the value of one rank.

        Args:
            value: This rank's value, with the same shape and type on all ranks.
            root_rank: The rank whose value all ranks get.
            name: Ranks match operations by this name; without one, by the order of their calls.

        Returns:
            The value of `root_rank`, as a tensor of the backend.
        """
        return self._run("broadcast", value, root_rank=root_rank, name=name)

    def reducescatter(
        self, value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE
    ) -> Any:
        """Reduce a value over all ranks, and return this rank's share of the result.

        Args:
            value: This rank's value, with the same shape and type on all ranks.
            name: Ranks match operations by this name; without one, by the order of their calls.
            op: `Average` (the default) or `Sum`.

        Returns:
            This rank's part of the first dimension of the reduced value.
        """
        return self._run("reducescatter", value, name=name, op=op)

    def broadcast_global_variables(self, root_rank: int) -> Any:
        """Give all global variables of a v1 graph of TensorFlow their values on one rank.

        Args:
            root_rank: The rank whose values all ranks get.

        Raises:
            RuntimeError: The program does not use a v1 graph, so there is no list of all variables.
        """
        if self._backend == "tensorflow":
            from horovod.tensorflow.functions import broadcast_global_variables as broadcast_all

            return _evaluate(broadcast_all(root_rank))
        raise RuntimeError(
            f"Keras on {self._backend} has no list of all variables: pass "
            "BroadcastGlobalVariablesCallback(root_rank) to fit()"
        )

    def _run(self, operation: str, value: Any, **arguments: Any) -> Any:
        """Call one of the binding's operations with a value, and return a tensor of the backend."""
        if self._backend == "tensorflow":
            from horovod.tensorflow import mpi_ops as tensorflow_ops

            return _evaluate(getattr(tensorflow_ops, operation)(value, **arguments))
        from keras import ops

        function: Callable[..., torch.Tensor] = getattr(mpi_ops, operation)
        tensor = ops.convert_to_tensor(value)
        if self._backend == "torch":
            return function(tensor.detach(), **arguments)
        array = np.array(ops.convert_to_numpy(tensor), order="C")
        return ops.convert_to_tensor(to_numpy(function(to_torch(array), **arguments), like=array))


def _evaluate(result: Any) -> Any:
    """Return the tensor itself, or in a v1 graph its value from the session."""
    import tensorflow as tf

    if tf.executing_eagerly():
        return result
    return tf.compat.v1.keras.backend.get_session().run(result)
