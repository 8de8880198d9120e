"""Gives all ranks the same parameters or Python objects; `horovod.mxnet` exports it to users."""

from __future__ import annotations

import types
from typing import Any

import mxnet as mx

from horovod.engine import objects
from horovod.engine.collective import WORLD
from horovod.engine.runtime import runtime
from horovod.engine.wait_for_all import wait_for_all
from horovod.mxnet.arrays import check_one_device, mxnet_errors
from horovod.mxnet.mpi_ops import broadcast_, start_broadcast


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Send one rank's Python object to all ranks.

    Args:
        obj: Object that can be pickled. The objects of ranks other than the root are ignored.
        root_rank: Rank whose object is sent. The default is 0.
        name: Name of the operation. By default it is `broadcast_object`.

    Returns:
        The root's object.
    """
    with mxnet_errors():
        return objects.broadcast_object(obj, root_rank, name or "broadcast_object", WORLD)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Collect a Python object from every rank.

    Args:
        obj: This rank's object, which can be pickled.
        name: Name of the operation. By default it is `allgather_object`.

    Returns:
        A list with the objects of all ranks, in the order of ranks.
    """
    with mxnet_errors():
        return objects.allgather_object(obj, name or "allgather_object", WORLD)


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite the parameters of a model with those of the root, in place.

    A parameter whose shape is not known before the first batch is broadcast when it is initialised.

    Args:
        params: Dict of arrays, such as those of `Module.get_params()`, or of gluon parameters, such
            as `block.collect_params()`.
        root_rank: Rank whose values all ranks get. The default is 0.
        prefix: Text before the operations' names, to tell several models apart. By default none.

    Raises:
        ValueError: `params` is neither of these, or a parameter is on several devices.

    Examples:
        >>> hvd.broadcast_parameters(network.collect_params(), root_rank=0)
    """
    if not isinstance(params, (dict, mx.gluon.parameter.ParameterDict)):
        raise ValueError(
            f"params must be a dict or a ParameterDict, not {type(params).__name__}: pass "
            "block.collect_params() or a dict of arrays"
        )
    if runtime.topology.size == 1:
        return
    started = []
    with mxnet_errors():
        for key, value in sorted(params.items()):
            name = f"{prefix or ''}{key}"
            for array in _arrays(value, root_rank, name):
                started.append(start_broadcast(array, root_rank, name))
        wait_for_all(started)


def _arrays(value: Any, root_rank: int, name: str) -> list[Any]:
    """Return a list with the array of a parameter; an empty one if it is initialised later."""
    if isinstance(value, mx.nd.NDArray):
        return [value]
    if not isinstance(value, mx.gluon.Parameter):
        raise ValueError(f"the parameter {name!r} is a {type(value).__name__}, not an array")
    try:
        return list(check_one_device(value.list_data(), name))
    except mx.gluon.parameter.DeferredInitializationError:
        _broadcast_when_initialised(value, root_rank, name)
        return []


def _broadcast_when_initialised(parameter: Any, root_rank: int, name: str) -> None:
    """Let the parameter broadcast its value as soon as MXNet initialises it."""
    initialise = parameter._init_impl

    def initialise_and_broadcast(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(*args, **kwargs)
        for array in self.list_data():
            broadcast_(array, root_rank, name)

    parameter._init_impl = types.MethodType(initialise_and_broadcast, parameter)
