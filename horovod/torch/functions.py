"""Making every rank's model and optimizer equal to the root's, and sending objects.

For an optimizer the root describes its state (which parameter has which entries, with the shape and
type of every tensor) and the others build the same. A root that has none yet makes what its first
step would (`horovod.torch.fresh_state`). Objects are sent by
`horovod.torch.ops.objects`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from horovod.engine.runtime import runtime
from horovod.engine.wait_for_all import wait_for_all
from horovod.torch import fresh_state
from horovod.torch.gradients.dtensors import broadcast_dtensors, is_dtensor
from horovod.torch.ops.broadcast import broadcast_async_
from horovod.torch.ops.handles import synchronize
from horovod.torch.ops.objects import allgather_object, broadcast_object
from horovod.torch.ops.untraced import breaks_graph

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

Tensor = torch.Tensor


@dataclass(frozen=True)
class _TensorForm:
    """Stands for a tensor in the root's description."""

    name: str  # name of the broadcast that brings its content
    shape: tuple[int, ...]
    dtype: torch.dtype
    beside_parameter: bool  # whether it is on its parameter's device; else it is on the CPU
    is_part: bool  # whether it is a DTensor, laid out like its parameter


@breaks_graph("call it outside of compiled code")
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with the root's, in place.

    Each rank gets the part that it holds of a DTensor from the rank that holds the same part in the
    root's copy of the model.

    Args:
        params: A dict of tensors such as ``model.state_dict()``, or a list of tensors or of
            ``(name, tensor)`` tuples such as ``list(model.named_parameters())``.
        root_rank: The rank whose values all ranks get.

    Raises:
        ValueError: `params` is neither, or it has anything but tensors in it, or a rank holds a
            part of a DTensor that the root's copy does not have.

    Examples:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [param if isinstance(param, tuple) else (None, param) for param in params]
    else:
        raise ValueError(
            f"params must be a dict or a list of parameters, not {type(params).__name__}"
        )
    names = Counter(name for name, _ in named if name is not None)
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"the parameter {name!r} is a {type(tensor).__name__}, not a tensor: send such "
                "values with broadcast_object"
            )
        if names[name] > 1:
            raise ValueError(f"{names[name]} parameters are called {name!r}")
    plain = [(name, tensor) for name, tensor in named if not is_dtensor(tensor)]
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in plain]
    wait_for_all(partial(synchronize, handle) for handle in handles)
    parts = [
        (name or f"DTensor.{index}", tensor)
        for index, (name, tensor) in enumerate(named)
        if is_dtensor(tensor)
    ]
    broadcast_dtensors(parts, root_rank)


@breaks_graph("call it outside of compiled code")
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state and options (learning rates, ...).

    If the root's optimizer has not taken a step, all ranks get the state that it begins with. The
    Python types of options are kept. On a rank whose optimizer had no state, parameters without a
    gradient get one of zeros, so that a script can broadcast gradients as well.

    Args:
        optimizer: Any torch optimizer except LBFGS, wrapped by `DistributedOptimizer` or not.
        root_rank: The rank whose state all ranks get.
        model: The model, if it has embeddings with ``sparse=True``: their zeros are sparse, too.

    Raises:
        ValueError: The ranks' optimizers have different parameters, or `optimizer` is LBFGS.

    Examples:
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "the state of torch.optim.LBFGS cannot be broadcast: it depends on the closure"
        )
    sharded: Any = optimizer if getattr(optimizer, "_shards", None) is not None else None
    if sharded is not None:  # its state is spread over the ranks
        sharded._broadcast_state(root_rank)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_root = runtime.topology.rank == root_rank
    is_fresh = not optimizer.state
    tensors: dict[str, Tensor] = {}
    if is_root and is_fresh:
        fresh_state.fill(optimizer)
    description = _describe(optimizer, parameters, tensors) if is_root else None
    description = broadcast_object(description, root_rank, "optimizer_state")
    _check_same_structure(optimizer, description, root_rank)
    if not is_root:
        _rebuild(optimizer, parameters, description, tensors)
    broadcast_parameters(tensors, root_rank)
    if is_fresh:
        fresh_state.zero_missing_gradients(optimizer, model)
    local: Any = optimizer if hasattr(optimizer, "_broadcast_progress") else None
    if local is not None:
        local._broadcast_progress(root_rank)


def broadcast_nested(value: Any, root_rank: int, name: str, device: torch.device) -> Any:
    """Return the root's dicts and lists of tensors and plain values on every rank. Collective.

    Tensors that the root has on a device are made on `device` elsewhere.
    """
    tensors: dict[str, Tensor] = {}

    def form_of(tensor: Tensor) -> _TensorForm:
        form = _TensorForm(
            f"{name}.{len(tensors)}", tuple(tensor.shape), tensor.dtype, not tensor.is_cpu, False
        )
        tensors[form.name] = tensor
        return form

    def tensor_of(form: _TensorForm) -> Tensor:
        there = device if form.beside_parameter else torch.device("cpu")
        tensors[form.name] = torch.empty(form.shape, dtype=form.dtype, device=there)
        return tensors[form.name]

    is_root = runtime.topology.rank == root_rank
    description = broadcast_object(
        replace_nested(value, Tensor, form_of) if is_root else None, root_rank, name
    )
    if not is_root:
        value = replace_nested(description, _TensorForm, tensor_of)
    broadcast_parameters(tensors, root_rank)
    return value


def _describe(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the root's state and options, with forms for tensors; those go into `tensors`."""
    indices = {parameter: index for index, parameter in enumerate(parameters)}
    occurrences: Counter[str] = Counter()

    def describe(name: str, value: Any, device: torch.device) -> Any:
        def form_of(tensor: Tensor) -> _TensorForm:
            occurrences[name] += 1
            unique = f"{name}.{occurrences[name]}"
            tensors[unique] = tensor
            shape, is_beside = tuple(tensor.shape), tensor.device == device
            return _TensorForm(unique, shape, tensor.dtype, is_beside, is_dtensor(tensor))

        return replace_nested(value, Tensor, form_of)

    state = {
        indices[parameter]: {
            name: describe(str(name), value, parameter.device) for name, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
        if parameter in indices
    }
    groups = [
        {
            name: describe(f"param_groups.{name}", value, _device(group))
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups, "shapes": _shapes(optimizer)}


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the parameters, by group, in which the ranks must not differ."""
    return [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def _device(group: dict[str, Any]) -> torch.device:
    return next((p.device for p in group["params"]), torch.device("cpu"))


def _check_same_structure(
    optimizer: torch.optim.Optimizer, description: dict[str, Any], root_rank: int
) -> None:
    """Raise on all ranks if one rank's optimizer holds other parameters than the root's."""
    agree = allgather_object(_shapes(optimizer) == description["shapes"], "optimizer_state.agree")
    different = [rank for rank, same in enumerate(agree) if not same]
    if different:
        raise ValueError(
            f"the optimizers of rank(s) {different} and of rank {root_rank} have different "
            "parameters or parameter groups"
        )


def _rebuild(
    optimizer: torch.optim.Optimizer,
    parameters: list[Tensor],
    description: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Give `optimizer` the described state; its tensors go into `tensors`, to be filled."""

    def rebuild(
        value: Any, current: Any, device: torch.device, parameter: Tensor | None = None
    ) -> Any:
        def tensor_of(form: _TensorForm) -> Tensor:
            if (
                isinstance(current, Tensor)
                and current.shape == form.shape
                and current.dtype == form.dtype
                and is_dtensor(current) == form.is_part
            ):
                tensor = current
            elif form.is_part and parameter is not None and form.shape == parameter.shape:
                tensor = torch.zeros_like(parameter, dtype=form.dtype, requires_grad=False)
            else:
                target = device if form.beside_parameter else torch.device("cpu")
                tensor = torch.zeros(form.shape, dtype=form.dtype, device=target)
            tensors[form.name] = tensor
            return tensor

        return replace_nested(value, _TensorForm, tensor_of)

    old_state = dict(optimizer.state)
    optimizer.state.clear()
    for index, entries in description["state"].items():
        parameter = parameters[index]
        old = old_state.get(parameter, {})
        optimizer.state[parameter] = {
            name: rebuild(value, old.get(name), parameter.device, parameter)
            for name, value in entries.items()
        }
    for group, options in zip(optimizer.param_groups, description["groups"], strict=True):
        for name in [name for name in group if name != "params" and name not in options]:
            del group[name]
        for name, value in options.items():
            group[name] = rebuild(value, group.get(name), _device(group))


def replace_nested(value: Any, kind: type, replacement: Callable[[Any], Any]) -> Any:
    """Return `value` with all of type `kind` replaced, also inside lists, tuples and dicts."""
    if isinstance(value, kind):
        return replacement(value)
    if type(value) is dict:
        return {key: replace_nested(item, kind, replacement) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replace_nested(item, kind, replacement) for item in value)
    return value
