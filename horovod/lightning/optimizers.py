"""When the gradients of a strategy's optimizers are reduced: after each backward pass, as with DDP.

Lightning clips, looks at and unscales gradients between backward and the optimizer's step, and by
then they must be those of all ranks. So they are reduced as soon as a backward pass is over, and
the step of a DistributedOptimizer only steps. Used by the strategies for Trainer and Fabric.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import horovod.torch as hvd
from horovod.common.reduce_op import Adasum, Max
from horovod.lightning.options import Options
from horovod.torch import reducing_optimizer
from horovod.torch.buckets import Named
from horovod.torch.local_optimizer import LocalStepsOptimizer


class Optimizers:
    """The optimizers of a strategy, wrapped."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._wrapped: list[Any] = []
        self._originals: list[Any] = []  # beside them: what the program's schedulers refer to
        self._led: list[tuple[Any, Any]] = []  # schedulers, with the optimizers they are made for
        self._blocked = False

    def wrap(self, optimizer: Any, named: Iterable[Named], passes: int) -> Any:
        """Look after one more. Collective."""
        wrapped = self._options.wrapped(optimizer, named, passes)
        self._wrapped.append(wrapped)
        self._originals.append(optimizer)
        return wrapped

    def lead(self, schedulers: Iterable[Any]) -> None:
        """Let schedulers of the originals belong to the wrapped ones, where callbacks look them up.

        The learning rates are in groups of parameters that both have in common.
        """
        for scheduler in schedulers:
            for wrapped, original in zip(self._wrapped, self._originals, strict=True):
                if wrapped is not original and scheduler.optimizer is original:
                    _track_steps(wrapped)
                    scheduler.optimizer = wrapped
                    self._led.append((scheduler, original))

    def any_wrapped(self) -> bool:
        return bool(self._wrapped)

    def release(self) -> list[Any]:
        """Training is over: what they were before, with all they have learned.

        One whose state is spread over the ranks stays what it is, or it could not be saved.
        """
        released = []
        for wrapped, original in zip(self._wrapped, self._originals, strict=True):
            sharded = getattr(wrapped, "_shards", None) is not None
            released.append(wrapped if sharded else original)
            if wrapped is not original:
                wrapped._remove_hooks()
                reducing_optimizer._optimizers.discard(wrapped)
                reducing_optimizer.share_groups(wrapped)
        for scheduler, original in self._led:
            scheduler.optimizer = original
        self._led = []
        self._wrapped, self._originals = [], []
        return released

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Backward passes inside only add up gradients on this rank."""
        earlier, self._blocked = self._blocked, True
        try:
            with ExitStack() as stack:
                for optimizer in self._wrapped:
                    stack.enter_context(optimizer.no_sync())
                yield
        finally:
            self._blocked = earlier

    def after_backward(self, only: bool = False) -> None:
        """Reduce the gradients that a backward pass has completed. Collective.

        `only`: there is one optimizer, and the pass was for it. Otherwise the ranks first agree
        whose gradients there are: with several losses, not every pass reaches every parameter.
        """
        active = [each for each in self._wrapped if each._reducer is not None]
        if self._blocked or not active:
            return
        if not (only and len(active) == 1):
            ready = torch.tensor([each._reducer.in_flight() for each in active], dtype=torch.uint8)
            process_set = self._options.process_set
            agreed = hvd.allreduce(ready, name="lightning.ready", op=Max, process_set=process_set)
            active = [each for each, yes in zip(active, agreed.tolist(), strict=True) if yes]
        for optimizer in active:
            optimizer.synchronize()

    def synchronize_parameters(self) -> None:
        """Let all ranks have the same parameters, where they have stepped alone. Collective."""
        for optimizer in self._wrapped:
            if isinstance(optimizer, LocalStepsOptimizer):
                optimizer.synchronize_parameters()

    def before_step(self, optimizer: Any, complete: bool, scaled: bool) -> None:
        """The last thing before an optimizer steps, or before a scaler looks at its gradients.

        `complete`: all backward passes were announced to `after_backward`. `scaled`: a scaler
        means to meet infinities, and looks for them itself.
        """
        if optimizer not in self._wrapped:
            return
        if not complete:
            self.after_backward()
            if not optimizer._synchronized:  # there were fewer passes than announced
                optimizer.synchronize()
        if not scaled:
            optimizer._check_gradients()

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """The optimizer steps inside, with gradients that are reduced already."""
        if optimizer in self._wrapped and optimizer.op != Adasum:  # whose ranks combine steps
            with optimizer.skip_synchronize():
                yield
        else:
            yield

    def averaged_loss(self, optimizer: Any, loss: Any) -> Any:
        """What an optimizer that goes by the loss is told: the same on all ranks."""
        reduces = optimizer in self._wrapped and optimizer._reducer is not None
        if loss is None or not reduces or not isinstance(optimizer, torch.optim.LBFGS):
            return loss
        mine = torch.as_tensor(loss).detach()
        return hvd.allreduce(mine, op=self._options.op, process_set=self._options.process_set)


def _track_steps(optimizer: Any) -> None:
    """What a scheduler does to its optimizer's step, to warn where it steps first itself."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    step, this = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer = this()
        assert optimizer is not None, "its step is called"
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = tracked
