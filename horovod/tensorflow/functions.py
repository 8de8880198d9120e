"""Makes variables and objects equal on all ranks.

The variables of one call travel together. The ranks first compare what they are about to exchange,
so that models which differ end in an error that names the variable, before any rank is changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine import objects
from horovod.engine.arguments import set_id
from horovod.engine.collective import Collective, Kind
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.engine.wait_for_all import wait_for_all
from horovod.tensorflow.ops import bridge
from horovod.tensorflow.ops.call import spec_like
from horovod.tensorflow.ops.errors import FailedPreconditionError, tensorflow_errors

_ALIGNMENT = 64  # bytes; TensorFlow takes over memory with this alignment, and copies other memory
_CHUNK = 64 * 2**20  # bytes; the most that one broadcast sends, unless a variable is larger

_Description = list[tuple[str, str, list[int]]]  # name, type and shape of every variable


# -- variables ------------------------------------------------------------------------------


@bridge.without_autograph
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give every rank the root's values of these variables, which may be Keras variables.

    Args:
        variables: A list such as ``model.variables``, with the same variables on all ranks.
        root_rank: The rank whose values all ranks get.
        process_set: The ranks that take part; all ranks by default.
        inplace: Accepted for compatibility; variables are always updated in place.

    Returns:
        None in eager execution, and in a graph the op that assigns the values.

    Raises:
        FailedPreconditionError: The ranks have different variables; none was changed.

    Examples:
        >>> hvd.broadcast_variables(model.variables, root_rank=0)
    """
    results = _broadcast(list(variables), root_rank, None, process_set)
    return None if tf.executing_eagerly() else tf.group(*results)


@bridge.without_autograph
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Give every rank the root's values of `variables`.

    Args:
        variables: The variables, the same on all ranks.
        root_rank: The rank whose values all ranks get.
        name: The name by which ranks match operations.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The new values.

    Raises:
        ValueError: Some are resource variables and others are reference variables.
    """
    variables = list(variables)
    # Resource variables have a handle.
    if len({isinstance(v, tf.Variable) and not hasattr(v, "handle") for v in variables}) > 1:
        raise ValueError("the variables must be all resource variables or all reference variables")
    results = _broadcast(variables, root_rank, name, process_set)
    return [tf.convert_to_tensor(result) for result in results]


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the op of a v1 graph that gives every rank the root's values of all global variables.

    Args:
        root_rank: The rank whose values all ranks get.

    Returns:
        The op.

    Raises:
        RuntimeError: Execution is eager, so there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() needs a v1 graph, as there are no global variables in "
            "eager execution: call broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives every rank the root's variables when a session begins or is restored.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Accepted for compatibility.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device or None):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


def _broadcast(
    variables: list[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[Any]:
    """Exchange and assign values, and return the results of the assignments."""
    if not variables and not tf.executing_eagerly():
        # In eager execution even empty lists are compared, because another rank may have variables.
        return []
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise ValueError(f"only variables can be broadcast into, not {type(variable).__name__}")
    names = [getattr(variable, "path", None) or variable.name for variable in variables]
    values = [tf.convert_to_tensor(variable) for variable in variables]

    def exchange(tensors: list[torch.Tensor], wire_name: str | None) -> list[torch.Tensor]:
        return _exchange(tensors, names, root_rank, wire_name or "variables", set_id(process_set))

    received = bridge.run(
        exchange,
        values,
        [spec_like(value) for value in values],
        name or "HorovodBroadcastVariables",
        ignore_name_scope=name is None,
    )
    if tf.executing_eagerly() and runtime.topology.rank == root_rank:
        return variables  # the root's variables have these values already
    return [variable.assign(value) for variable, value in zip(variables, received, strict=True)]


def _exchange(
    tensors: list[torch.Tensor], names: list[str], root_rank: int, wire_name: str, number: int
) -> list[torch.Tensor]:
    """Return the root's tensors, as parts of a few large buffers."""
    _check_alike(tensors, names, wire_name, number)
    is_root = runtime.topology.rank == root_rank
    results: list[torch.Tensor] = []
    requests: list[Request] = []
    for chunk in _chunks(tensors):
        offsets, total = [], 0
        for tensor in chunk:
            offsets.append(total)
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(total, dtype=torch.uint8, device=chunk[0].device)
        parts = [
            buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, chunk, strict=True)
        ]
        if is_root:
            for part, tensor in zip(parts, chunk, strict=True):
                part.copy_(tensor)
        results += parts
        own_name = f"{wire_name}.{len(requests)}"
        collective = Collective(Kind.BROADCAST, own_name, number, root_rank=root_rank)
        requests.append(runtime.submit(collective, [buffer], [buffer]))
    wait_for_all(partial(bridge.wait, request) for request in requests)
    return results


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Cut the list into runs on one device, of at most `_CHUNK` bytes, that travel together."""
    chunks: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if not chunks or size > _CHUNK or tensor.device != chunks[-1][0].device:
            chunks.append([])
            size = tensor.nbytes
        chunks[-1].append(tensor)
    return chunks


def _check_alike(
    tensors: list[torch.Tensor], names: list[str], wire_name: str, number: int
) -> None:
    """Raise on all ranks if they are about to exchange different variables."""
    mine: _Description = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in zip(names, tensors, strict=True)
    ]
    comparable = [(_without_numbers(name), *form) for name, *form in mine]
    digest = hashlib.blake2b(repr(comparable).encode(), digest_size=8).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    collective = Collective(Kind.ALLGATHER, f"{wire_name}.form", number)
    (digests,) = bridge.wait(runtime.submit(collective, [own], background=False))
    if len(set(digests.tolist())) == 1:
        return
    everyone = objects.allgather_object(mine, f"{wire_name}.forms", number)
    ranks = runtime.process_set_ranks(number)
    other = next(i for i, value in enumerate(digests.tolist()) if value != digests[0])
    raise FailedPreconditionError.with_message(
        f"the variables to broadcast differ between ranks {ranks[0]} and {ranks[other]}: "
        f"{_first_difference(everyone[0], everyone[other])}. No variable was changed."
    )


def _without_numbers(name: str) -> str:
    """Return a name without the numbers that frameworks append to make names unique.

    The numbers depend on what else a rank has made, for example another model before a restart.
    """
    return re.sub(r"_\d+(?=$|[/:_])", "", name.partition(":")[0])


def _first_difference(one: _Description, other: _Description) -> str:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left[1:] != right[1:] or _without_numbers(left[0]) != _without_numbers(right[0]):
            return f"number {index} is {_describe(left)} and {_describe(right)}"
    longer = max(one, other, key=len)
    extra = longer[min(len(one), len(other))]
    return (
        f"there are {len(one)} and {len(other)} of them; only one of the ranks has "
        f"{_describe(extra)}"
    )


def _describe(variable: tuple[str, str, list[int]]) -> str:
    name, dtype, shape = variable
    return f"{name!r} of type {dtype} and shape {shape}"


# -- objects --------------------------------------------------------------------------------


@bridge.without_autograph
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the root's object; the objects of other ranks are ignored.

    Args:
        obj: An object that can be pickled.
        root_rank: The rank whose object all ranks get; 0 by default.
        session: Accepted for compatibility; objects do not travel through TensorFlow.
        name: A name that makes it possible to run several of these at the same time.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        The root's object.

    Raises:
        ValueError: The root could not pickle its object; all ranks raise.
    """
    with tensorflow_errors():
        return objects.broadcast_object(
            obj, root_rank, name or "broadcast_object", set_id(process_set)
        )


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts the object with which it is called.

    Args:
        root_rank: The rank whose object all ranks get; 0 by default.
        session: Accepted for compatibility; objects do not travel through TensorFlow.
        name: A name that makes it possible to run several of these at the same time.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A function that takes an object and returns the root's object.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@bridge.without_autograph
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather the objects of all ranks.

    Args:
        obj: An object that can be pickled.
        session: Accepted for compatibility; objects do not travel through TensorFlow.
        name: A name that makes it possible to run several of these at the same time.
        process_set: The ranks that take part; all ranks by default.

    Returns:
        A list of the ranks' objects, in the order of ranks.

    Raises:
        ValueError: A rank could not pickle its object; all ranks raise.
    """
    with tensorflow_errors():
        return objects.allgather_object(obj, name or "allgather_object", set_id(process_set))
