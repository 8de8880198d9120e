"""The state that an optimizer begins with, before its first step.

Optimizers of torch make it in their first step. `broadcast_optimizer_state` makes it earlier,
because scripts look at it afterwards. Training then goes on exactly as if nobody had made it: no
parameter, gradient or step count changes. Parameters without a gradient get one of zeros, as in
Horovod 0.28.1, whose scripts broadcast gradients.
"""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod.common.logging import get_logger

Tensor = torch.Tensor

logger = get_logger(__name__)


def fill(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of an optimizer that has none yet.

    It stays empty where the optimizer keeps none, or only its first step can make it.
    """
    try:
        if hasattr(optimizer, "_init_group"):
            _initialise(optimizer)
        else:
            _take_from_a_trial(optimizer)
    except Exception as error:  # of optimizers that need more than gradients, such as a closure
        logger.debug("cannot make the state of %s early: %s", type(optimizer).__name__, error)
        optimizer.state.clear()
    for parameter in [p for p, entries in optimizer.state.items() if not entries]:
        del optimizer.state[parameter]


def zero_missing_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Give zeros as gradient to the trained parameters of an optimizer that have none.

    Zeros are sparse where the gradient will be: added to dense ones, it would become dense.
    """
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    tables = {
        layer.weight
        for layer in ([] if model is None else model.modules())
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }
    for group in optimizer.param_groups:
        for parameter in _trained(group):
            if parameter.grad is None:
                zeros = torch.zeros_like(parameter, requires_grad=False)
                parameter.grad = zeros.to_sparse(1) if is_sparse or parameter in tables else zeros


def _initialise(optimizer: Any) -> None:
    """Make the state by what torch's optimizers call at the beginning of a step, `_init_group`."""
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    for group in optimizer.param_groups:
        for parameter in _trained(group):
            with _zero_gradient(parameter):
                optimizer._init_group({**group, "params": [parameter]}, *([] for _ in range(lists)))
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
                # SGD makes this buffer in its first step, from the gradient. With a buffer of zeros
                # the step computes the same, unless the gradient is dampened.
                buffer = None if group["dampening"] else torch.zeros_like(parameter)
                optimizer.state[parameter]["momentum_buffer"] = buffer


def _take_from_a_trial(optimizer: torch.optim.Optimizer) -> None:
    """Take the state from a step of a copy of the optimizer, on stand-ins with zero gradients."""
    trial: Any = copy.copy(optimizer)
    trial.state = collections.defaultdict(dict)
    sparse = isinstance(trial, torch.optim.SparseAdam)
    stand_ins: dict[Tensor, Tensor] = {}
    trial.param_groups = []
    for group in optimizer.param_groups:
        for parameter in _trained(group):
            stand_ins[parameter] = torch.zeros_like(parameter)
            zeros = torch.zeros_like(parameter)
            stand_ins[parameter].grad = zeros.to_sparse(1) if sparse else zeros
        present = [stand_ins[p] for p in _trained(group)]
        trial.param_groups.append({**group, "params": present})
    _plain_class(optimizer).step(trial)
    for parameter, stand_in in stand_ins.items():
        entries = dict(trial.state[stand_in])
        if "step" in entries:
            entries["step"] = entries["step"] * 0  # a number or a tensor; the trial does not count
        optimizer.state[parameter] = entries


def _plain_class(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer's class without what Horovod adds to it."""
    ours = f"{__name__.rpartition('.')[0]}."
    return next(
        kind
        for kind in type(optimizer).__mro__
        if "step" in vars(kind) and not kind.__module__.startswith(ours)
    )


def _trained(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.requires_grad]


@contextmanager
def _zero_gradient(parameter: Tensor) -> Iterator[None]:
    gradient = parameter.grad
    parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        parameter.grad = gradient
