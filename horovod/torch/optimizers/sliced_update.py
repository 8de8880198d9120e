"""Updating a parameter slice by slice: with the first part of its gradient while the rest arrives.

For optimizers that update each element by itself. To them a slice is a parameter of its own, whose
state is that part of the whole one's. Used by `horovod.torch.optimizers.delayed_update`, which says
when, and by `horovod.torch.optimizers.delaying`, which makes the step.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch

from horovod.torch.gradients.layouts import flat, laid_out_like

Parameter = torch.nn.Parameter
State = dict[str, Any]
States = MutableMapping[torch.Tensor, State]  # an optimizer's, by parameters


class SlicedParameter:
    """A dense parameter with a gradient that is laid out like it, in one step."""

    def __init__(self, param: Parameter) -> None:
        assert param.grad is not None
        self.param = param
        self._whole = param.detach()  # the same memory: itself, it waits for its update
        self._values, self._gradient = flat(self._whole), flat(param.grad.data)
        self._before: State | None = None  # the state when the first slice was updated
        self._after: State = {}

    def lend(self, start: int, stop: int, states: States) -> torch.Tensor:
        """What stands for these elements in a step of the optimizer, which finds their state."""
        stand_in = self._values[start:stop]
        stand_in.grad = self._gradient[start:stop]
        states[stand_in] = {
            key: flat(value)[start:stop] if self._is_whole(value) else copy.deepcopy(value)
            for key, value in self._state_before(states).items()
        }
        return stand_in

    def take_back(self, stand_in: torch.Tensor, start: int, states: States) -> None:
        """The step is made. The optimizer's state is complete when it is made for all elements."""
        for key, value in states.pop(stand_in).items():
            known = self._state_before(states).get(key)
            new = known is None and isinstance(value, torch.Tensor)
            if self._is_whole(known) or (new and value.shape == stand_in.shape):
                self._keep(key, value, start)
            else:
                self._after[key] = value  # such as the number of steps, for any slice the same
        if start + stand_in.numel() == self._values.numel() and self._after:
            states[self.param].update(self._after)

    def _keep(self, key: str, value: torch.Tensor, start: int) -> None:
        """Some elements of what the state has for each."""
        whole = self._after.get(key)
        if whole is None:
            whole = (self._before or {}).get(key)
            if whole is None:
                whole = torch.empty_like(self._whole, dtype=value.dtype)
            self._after[key] = whole
        target = flat(whole)[start : start + value.numel()]
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)

    def _state_before(self, states: States) -> State:
        if self._before is None:
            self._before = {
                key: laid_out_like(self._whole, value) if self._is_whole(value) else value
                for key, value in states.get(self.param, {}).items()
            }
        return self._before

    def _is_whole(self, value: Any) -> bool:
        """Return whether this has a number for every element of the parameter."""
        return isinstance(value, torch.Tensor) and value.shape == self._whole.shape


class Slice(NamedTuple):
    """Elements that are updated together. Those of one parameter are in their order."""

    of: SlicedParameter
    start: int
    stop: int
