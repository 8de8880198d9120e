"""The optimizer for overlap_forward=model: parameters are updated as the next forward needs them.

`step()` starts the reduction of all gradients, and returns. Each bucket's parameters are updated
when somebody is about to use one of them, usually a layer of the next forward. So the next forward
hides the time of the network that backward could not hide.

Everybody sees what an ordinary step would have left: parameters and gradients (see
`horovod.torch.optimizers.pending`), optimizer state, options of the groups as they were in
`step()`. Where there is nothing to gain, or the gradients must be complete in `step()` (a scaler or
step hooks look at them, HOROVOD_CHECK_NAN, after `synchronize`), the step is an ordinary one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from horovod.engine.runtime import runtime
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.reducer import GradientReducer
from horovod.torch.ops.untraced import untraced
from horovod.torch.optimizers.delayed_update import DelayedUpdates, Options
from horovod.torch.optimizers.options import TorchOptions
from horovod.torch.optimizers.pending import is_pending, lock, watch_iteration, with_aliases
from horovod.torch.optimizers.reducing import GradientCountdown, ReducingOptimizer
from horovod.torch.optimizers.wrapping import notify_scheduler, step_of

Parameter = torch.nn.Parameter


class DelayingOptimizer(ReducingOptimizer):
    """Delays updates until parameters are used; the new class derives from this and the user's."""

    _delays = True
    _updates: DelayedUpdates | None = None

    def _configure(
        self, options: TorchOptions, named: list[Named], groups: list[list[Named]] | None
    ) -> None:
        self._finish_updates()
        super()._configure(options, named, groups)
        model = options.overlap_forward
        assert model is not None
        in_model = {param for param in model.parameters() if type(param) is Parameter}
        self._delayable = [param for param in self._parameter_names if param in in_model]
        self._others = [param for param in self._parameter_names if param not in in_model]
        self._updates = None
        if self._reducer is not None:
            self._updates = DelayedUpdates(self._step_on)
            watch_iteration(self._updates)

    def _finish_updates(self) -> None:
        with lock:
            if self._updates is not None:
                self._updates.finish()

    # -- stepping --------------------------------------------------------------------------

    @untraced
    def step(self, closure: Any = None) -> Any:
        """Update the parameters with the gradients of all ranks, each before it is used again."""
        if closure is not None:
            raise ValueError(
                "step(closure) does not go with overlap_forward, with which step() returns before "
                "parameters are updated: compute loss and gradients first and call step() without "
                "a closure, or leave overlap_forward out"
            )
        self._finish_updates()
        if not self._can_delay():
            return super().step()
        notify_scheduler(self)
        self._begin()
        runtime.statistics.end_step()
        return None

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: it hooks the base's step

    def _can_delay(self) -> bool:
        if self._synchronized or not self._should_synchronize or self._finite_check is not None:
            return False
        # Hooks before the step look at gradients, perhaps to change them.
        hooks = self._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks
        reducer = self._reducer
        return not hooks and isinstance(reducer, GradientReducer) and reducer.can_delay()

    @torch.optim.Optimizer.profile_hook_step
    def _begin(self) -> None:
        """Begin a step, which to its hooks looks like an ordinary one."""
        reducer, updates = self._reducer, self._updates
        assert isinstance(reducer, GradientReducer)
        assert updates is not None
        try:
            buckets = reducer.release()
        finally:
            self._reset_passes()
        self._register_hooks()  # for parameters that were frozen before
        self._synchronized = self._seen_by_scaler = False
        at_once = [*self._others, *with_aliases(self._delayable)]
        updates.begin(buckets, self.param_groups)
        updates.finish(at_once)

    def _step_on(self, options: Sequence[Options], params: set[Parameter]) -> None:
        """Take the wrapped optimizer's step on some of the parameters."""
        groups = self.param_groups
        used = [
            {**own, "params": [param for param in group["params"] if param in params]}
            for own, group in zip(options, groups, strict=True)
        ]
        updates, self._updates = self._updates, None  # or its look at `state` would finish them
        self.param_groups = [group for group in used if group["params"]]
        try:
            step_of(type(self).__bases__[1])(self)
        finally:
            self._updates = updates
            self.param_groups = groups
        for group, own, after in zip(groups, options, used, strict=True):
            # Some optimizers keep things of their own in their groups.
            changed = {key: v for key, v in after.items() if v is not own.get(key, group)}
            group.update({key: v for key, v in changed.items() if key != "params"})

    def _on_gradient(self, param: Any, countdown: GradientCountdown) -> None:
        if is_pending(param):
            raise RuntimeError(
                f"overlap_forward: a gradient of {self._parameter_names[param]!r} was computed "
                f"with the value from before the last step, because what used the parameter "
                f"cannot be seen from here (a scripted copy of the model, say), or because "
                f"backward() ran again through a graph from before: leave overlap_forward out"
            )
        super()._on_gradient(param, countdown)

    # -- what sees results -----------------------------------------------------------------

    @property
    def state(self) -> Any:
        self._finish_updates()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def synchronize(self) -> None:
        self._finish_updates()
        super().synchronize()

    def state_dict(self) -> dict[str, Any]:
        self._finish_updates()
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._finish_updates()
        super().load_state_dict(state_dict)

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Reset the gradients; those of updates that are still to be made will not be seen."""
        set_to_none = arguments[0] if arguments else options.get("set_to_none", True)
        if not set_to_none:
            self._finish_updates()
        if self._updates is not None:
            self._updates.clear_gradients()
        groups = self.param_groups
        params = itertools.chain.from_iterable(group["params"] for group in groups)
        # To look at the gradients of pending parameters would be to wait for them.
        self.param_groups = [{"params": [param for param in params if not is_pending(param)]}]
        try:
            super().zero_grad(*arguments, **options)
        finally:
            self.param_groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._finish_updates()
        super().add_param_group(param_group)

    def _restart(self) -> None:
        if self._updates is not None:
            self._updates.abandon()
        super()._restart()

    def __reduce__(self) -> Any:
        self._finish_updates()
        return super().__reduce__()
