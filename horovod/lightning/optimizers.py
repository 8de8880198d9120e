"""Reduces the gradients of a strategy's optimizers after each backward pass, as DDP does.

Lightning clips, inspects and unscales gradients between backward and the optimizer's step, and by
then they must be the gradients of all ranks. So they are reduced as soon as a backward pass is
over, and the step of a DistributedOptimizer reduces nothing. The strategies for Trainer and Fabric
use this module.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

import horovod.torch as hvd
from horovod.common.reduce_op import Adasum, Max
from horovod.torch.gradients.buckets import Named
from horovod.torch.optimizer import distribute
from horovod.torch.optimizers import reducing
from horovod.torch.optimizers.local import LocalStepsOptimizer
from horovod.torch.optimizers.options import TorchOptions
from horovod.torch.optimizers.wrapping import share_groups


class Optimizers:
    """The optimizers of a strategy, each wrapped in a DistributedOptimizer."""

    def __init__(self, options: TorchOptions) -> None:
        self._options = options
        self._wrapped: list[Any] = []
        self._originals: list[Any] = []  # in the same order; the program's schedulers refer to them
        self._adopted_schedulers: list[tuple[Any, Any]] = []  # each with its original optimizer
        self._is_blocked = False

    def wrap(self, optimizer: Any, named: Iterable[Named], passes: int) -> Any:
        """Wrap an optimizer, unless the script has done so, and keep track of it. Collective."""
        wrapped = optimizer
        if not isinstance(optimizer, reducing.ReducingOptimizer):
            names = {id(param): name for name, param in named}
            params = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
            options = replace(
                self._options,
                # Parameters that do not belong to the module have no name there.
                named_parameters=[
                    (names.get(id(param), f"parameter.{number}"), param)
                    for number, param in enumerate(params)
                ],
                backward_passes_per_step=passes,
                groups=_groups_among(self._options.groups, params),
                # A hook keeps the state of one optimizer; a program may have several, or fit again.
                communication_hook=copy.deepcopy(self._options.communication_hook),
            )
            wrapped = distribute(optimizer, options)
        self._wrapped.append(wrapped)
        self._originals.append(optimizer)
        return wrapped

    def adopt_schedulers(self, schedulers: Iterable[Any]) -> None:
        """Attach schedulers of the originals to the wrapped optimizers, as callbacks expect.

        The original and the wrapped optimizer share their parameter groups, which hold the learning
        rates.
        """
        for scheduler in schedulers:
            for wrapped, original in zip(self._wrapped, self._originals, strict=True):
                if wrapped is not original and scheduler.optimizer is original:
                    _track_steps(wrapped)
                    scheduler.optimizer = wrapped
                    self._adopted_schedulers.append((scheduler, original))

    def release(self) -> list[Any]:
        """Undo the wrapping after training, and return the original optimizers with their state.

        An optimizer whose state is sharded over the ranks stays wrapped; otherwise it could not be
        saved.
        """
        released = []
        for wrapped, original in zip(self._wrapped, self._originals, strict=True):
            sharded = getattr(wrapped, "_shards", None) is not None
            released.append(wrapped if sharded else original)
            if wrapped is not original:
                wrapped._remove_hooks()
                reducing._optimizers.discard(wrapped)
                share_groups(wrapped)
        for scheduler, original in self._adopted_schedulers:
            scheduler.optimizer = original
        self._adopted_schedulers = []
        self._wrapped, self._originals = [], []
        return released

    @contextmanager
    def block_reduction(self) -> Iterator[None]:
        """Let backward passes inside this context only add up gradients on this rank."""
        was_blocked, self._is_blocked = self._is_blocked, True
        try:
            with ExitStack() as stack:
                for optimizer in self._wrapped:
                    stack.enter_context(optimizer.no_sync())
                yield
        finally:
            self._is_blocked = was_blocked

    def after_backward(self, is_automatic: bool = False) -> None:
        """Reduce the gradients that a backward pass has completed. Collective.

        With automatic optimization and one optimizer, every pass is for that optimizer. Otherwise
        the ranks first agree which optimizers have gradients: with several losses, not every pass
        reaches every parameter.
        """
        active = [each for each in self._wrapped if each._reducer is not None]
        if self._is_blocked or not active:
            return
        if not (is_automatic and len(active) == 1):
            ready = torch.tensor([each._reducer.in_flight() for each in active], dtype=torch.uint8)
            process_set = self._options.process_set
            agreed = hvd.allreduce(ready, name="lightning.ready", op=Max, process_set=process_set)
            active = [
                each for each, is_ready in zip(active, agreed.tolist(), strict=True) if is_ready
            ]
        for optimizer in active:
            optimizer.synchronize()

    def synchronize_parameters(self) -> None:
        """Give all ranks the same parameters, if they have taken local steps. Collective."""
        for optimizer in self._wrapped:
            if isinstance(optimizer, LocalStepsOptimizer):
                optimizer.synchronize_parameters()

    def before_step(self, optimizer: Any, is_automatic: bool, is_scaled: bool) -> None:
        """Finish the gradients just before an optimizer steps, or before a scaler inspects them.

        With automatic optimization, `after_backward` has seen every backward pass. With a scaler
        infinities are expected, and the scaler looks for them itself.
        """
        if optimizer not in self._wrapped:
            return
        if not is_automatic:
            self.after_backward()
            if not optimizer._synchronized:  # fewer passes than backward_passes_per_step
                optimizer.synchronize()
        if not is_scaled:
            optimizer._check_gradients()

    @contextmanager
    def skip_reduction(self, optimizer: Any) -> Iterator[None]:
        """Let the optimizer step inside this context without reducing its gradients again.

        Adasum is different: its ranks combine their steps, not their gradients.
        """
        if optimizer in self._wrapped and optimizer.op != Adasum:
            with optimizer.skip_synchronize():
                yield
        else:
            yield

    def average_loss(self, optimizer: Any, loss: Any) -> Any:
        """Return the loss averaged over the ranks for LBFGS, which decides by it; else `loss`."""
        reduces = optimizer in self._wrapped and optimizer._reducer is not None
        if loss is None or not reduces or not isinstance(optimizer, torch.optim.LBFGS):
            return loss
        mine = torch.as_tensor(loss).detach()
        return hvd.allreduce(mine, op=self._options.op, process_set=self._options.process_set)


def _groups_among(groups: Any, params: Iterable[torch.Tensor]) -> Any:
    """Return the groups reduced to these parameters, without those that become empty."""
    if not isinstance(groups, (list, tuple)):
        return groups
    known = {id(param) for param in params}
    kept = [[param for param in group if id(param) in known] for group in groups]
    return [group for group in kept if group]


def _track_steps(optimizer: Any) -> None:
    """Record the optimizer's steps as torch's schedulers do, which warn if they step first."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    # A weak reference, because the optimizer will hold the function that is made here.
    step, this = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer = this()
        assert optimizer is not None, "its step is called"
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = tracked
