"""Gives Keras variables the same values on all ranks, and converts arrays for that.

Values travel as numpy arrays in host memory, which every backend can read and assign. It happens
once in a training, so speed does not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod._keras.flavour import backend_of, is_tf_keras, keras_of
from horovod.torch.functions import broadcast_parameters
from horovod.torch.ops.objects import allgather_object

Array = np.ndarray[Any, Any]


def broadcast_model(model: Any, root_rank: int, local_variables: Sequence[Any] = ()) -> None:
    """Overwrite a model's weights and its optimizer's state with the root's, on all ranks.

    The states of random generators stay different, so that each rank drops other units. The sums of
    gradients that the ranks have not exchanged yet stay as they are, too.
    """
    optimizer = getattr(model, "optimizer", None)
    sums = None if is_tf_keras(model) else getattr(optimizer, "_hvd_sums", None)
    own = [*local_variables, *(sums.variables if sums else ())]
    left_out = {variable_key(variable) for variable in own}
    variables = [
        variable
        for variable in [*model.weights, *optimizer_variables(optimizer)]
        if variable_key(variable) not in left_out
    ]
    values = read_values(variables, model)
    with raise_errors_of(backend_of(model)):
        _check_same(variables, values, root_rank)
        received = _broadcast(values, root_rank)
    write_values(variables, received, model)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return all variables of an optimizer."""
    if optimizer is None:
        return []
    listed = optimizer.variables
    variables = list(listed() if callable(listed) else listed)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # tf-keras does not list the learning rate, nor the other options of its legacy optimizers.
    others = [getattr(inner, "_learning_rate", None), *getattr(inner, "_hyper", {}).values()]
    known = {id(variable) for variable in variables}
    return variables + [v for v in others if hasattr(v, "assign") and id(v) not in known]


def variable_key(variable: Any) -> int:
    """Return a key that a variable of TensorFlow shares with the Keras variable around it."""
    return id(getattr(variable, "handle", variable))


def raise_errors_of(backend: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that raises the engine's errors as those of the backend."""
    if backend != "tensorflow":
        return contextlib.nullcontext()
    from horovod.tensorflow.ops.errors import tensorflow_errors

    return tensorflow_errors()


def read_values(variables: Sequence[Any], model: Any) -> list[Any]:
    """Return copies of the values of a model's variables, as arrays."""
    keras = keras_of(model)
    if is_tf_keras(model):
        values = keras.backend.batch_get_value(list(variables))  # also from a v1 session
    else:
        values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    return [np.array(value, order="C") for value in values]


def write_values(variables: Sequence[Any], values: Sequence[Any], model: Any) -> None:
    """Give variables of a model these values, which are in the same order."""
    if is_tf_keras(model):
        keras_of(model).backend.batch_set_value(list(zip(variables, values, strict=True)))
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _check_same(variables: Sequence[Any], values: Sequence[Any], root_rank: int) -> None:
    """Raise ValueError on all ranks if one rank's variables cannot take the root's values."""
    mine = [
        (str(getattr(variable, "path", variable.name)), value.shape, value.dtype.name)
        for variable, value in zip(variables, values, strict=True)
    ]
    everybody = allgather_object(mine, "BroadcastGlobalVariables.forms")
    root = everybody[root_rank]
    for rank, theirs in enumerate(everybody):
        for (name, *form), (root_name, *root_form) in zip(theirs, root, strict=False):
            if form != root_form:
                raise ValueError(
                    f"the models of the ranks differ: the variable {name} of rank {rank} is "
                    f"{_form(form)}, and in its place rank {root_rank} has {root_name}, "
                    f"{_form(root_form)}"
                )
        if len(theirs) != len(root):
            longer, those = (rank, theirs) if len(theirs) > len(root) else (root_rank, root)
            extra = those[min(len(theirs), len(root))][0]
            raise ValueError(
                f"the models of the ranks differ: rank {rank} has {len(theirs)} variables and "
                f"rank {root_rank} has {len(root)}; {extra} of rank {longer} is the first that "
                "the other does not have"
            )


def _form(form: Sequence[Any]) -> str:
    shape, dtype = form
    return f"{dtype} of shape {tuple(shape)}"


def _broadcast(values: Sequence[Any], root_rank: int) -> list[Any]:
    tensors = [to_torch(value) for value in values]
    names = [f"BroadcastGlobalVariables.{number}" for number in range(len(tensors))]
    broadcast_parameters(list(zip(names, tensors, strict=True)), root_rank)
    return [to_numpy(tensor, value) for tensor, value in zip(tensors, values, strict=True)]


def to_torch(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory, or a copy if that is not writeable.

    Numpy lacks bfloat16: such arrays have a type of another package, ml_dtypes.
    """
    if not array.flags.writeable or not array.flags.c_contiguous:
        if array.flags.owndata and array.flags.c_contiguous:
            array.setflags(write=True)  # the memory belongs to this array alone
        else:
            array = np.array(array, order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor, like: Array) -> Array:
    """Return an array that shares the tensor's memory and has the dtype of `like`."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(like.dtype)
    return tensor.numpy()
