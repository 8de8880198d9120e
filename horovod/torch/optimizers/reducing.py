"""A torch optimizer whose gradients are averaged over all ranks.

`horovod.torch.optimizer` makes of a user's optimizer an instance of a new class with the same name.
That derives from ReducingOptimizer and from the optimizer's own class, so isinstance checks,
learning-rate schedulers and checkpoints go on working.

torch.compile must not look into methods that talk to other ranks, which are marked `untraced`. It
may compile the optimizer's own update, which `step` calls beside them (`calls_traced`). This module
is loaded when the first optimizer is wrapped, because the marks load the compiler. To have made an
optimizer is to have loaded it already.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from horovod.common import process_sets
from horovod.common.optimizer_options import check_passes
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.execution import capture
from horovod.engine.runtime import runtime
from horovod.torch.compression import NoneCompressor, is_eight_bit, wire_type
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.dtensors import with_local_shards
from horovod.torch.gradients.reducer import GradientReducer, Reducer
from horovod.torch.gradients.submission import BucketSubmitter
from horovod.torch.hooks.eightbit import eight_bit_hook
from horovod.torch.ops.allreduce import allreduce
from horovod.torch.ops.untraced import calls_traced, untraced
from horovod.torch.optimizers.checks import check_options, default_names, takes_part
from horovod.torch.optimizers.finite_check import FiniteCheck
from horovod.torch.optimizers.grad_scaler import reduce_before_unscaling
from horovod.torch.optimizers.options import TorchOptions
from horovod.torch.optimizers.wrapping import new_optimizer, notify_scheduler, share_groups

Parameter = torch.nn.Parameter


class GradientCountdown:
    """What is known of one parameter's gradient, for the hook that notices it as it arrives.

    It has no reference to the parameter, which has the hook: such a circle would never be freed.
    """

    __slots__ = ("hook", "index", "passes_left")

    def __init__(self, index: int, passes: int) -> None:
        self.index = index  # the parameter's index among all
        self.passes_left = passes  # backward passes until the gradient is complete
        self.hook: Any = None  # the hook; None while the parameter is frozen


class ReducingOptimizer(torch.optim.Optimizer):
    """Reduces gradients; the new class derives from this and from the optimizer's own class."""

    _kept: tuple[str, ...] = ("param_groups", "state", "defaults")  # attributes that copies get
    _delays = False  # whether parameters are updated when they are next used, not in step()

    def _configure(
        self, options: TorchOptions, named: list[Named], groups: list[list[Named]] | None
    ) -> None:
        self._options = replace(options, named_parameters=None)  # the names are kept below
        self.backward_passes_per_step = options.backward_passes_per_step
        self.op = options.op
        self.gradient_predivide_factor = options.gradient_predivide_factor
        self.sparse_as_dense = options.sparse_as_dense
        self.process_set = options.process_set
        self._compression = options.compression
        self._communication_hook = options.communication_hook
        if self._communication_hook is not None:
            self._communication_hook.serve(self)
        elif is_eight_bit(self._compression) and wire_type(self._compression, named) is None:
            # Not all gradients are in host memory: the ranks exchange them in 8 bits themselves.
            self._communication_hook = eight_bit_hook(self._compression)
            self._compression = NoneCompressor
        self._parameter_names = {param: name for name, param in named}
        self._synchronized = False
        self._seen_by_scaler = False
        self._should_synchronize = True
        self._accumulating = False
        self._groups = groups
        reduce_before_unscaling()
        self._attach(named)
        _optimizers.add(self)

    def _gradient_set(self) -> ProcessSet | None:
        """Return the ranks to reduce gradients with; None if they stay this rank's own."""
        return self.process_set if takes_part(self.process_set) else None

    def _attach(self, named: list[Named]) -> None:
        """Begin to notice gradients, if there is somebody to reduce them with."""
        self._countdowns: list[GradientCountdown] = []
        self._reducer: Reducer | None = None
        together = self._together = self._gradient_set()
        check = FiniteCheck(self._parameter_names, together) if runtime.config.check_nan else None
        self._finite_check = check
        if together is not None:
            self._reducer = self._make_reducer(*with_local_shards(named, self._groups))
            passes = self.backward_passes_per_step
            self._countdowns = [GradientCountdown(index, passes) for index in range(len(named))]
            self._register_hooks()

    def _reattach(self) -> None:
        """Reduce gradients with other ranks than before."""
        self._remove_hooks()
        self._attach(_pairs(self._parameter_names))

    def _make_reducer(self, named: list[Named], groups: list[list[Named]] | None) -> Reducer:
        assert self._together is not None
        options = replace(self._options, compression=self._compression, process_set=self._together)
        submitter = BucketSubmitter(named, options, self._communication_hook, self._delays)
        return GradientReducer(named, groups, submitter)

    def _register_hooks(self) -> None:
        """Notice arriving gradients of all parameters that require them now."""
        this = weakref.ref(self)
        for param, countdown in zip(self._parameter_names, self._countdowns, strict=True):
            if countdown.hook is None and param.requires_grad:

                @untraced
                def on_gradient(
                    param: torch.Tensor, countdown: GradientCountdown = countdown
                ) -> None:
                    optimizer = this()
                    if optimizer is not None:
                        optimizer._on_gradient(param, countdown)

                countdown.hook = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _remove_hooks(self) -> None:
        for countdown in self._countdowns:
            if countdown.hook is not None:
                countdown.hook.remove()
        self._countdowns = []
        if self._reducer is not None:
            self._reducer.close()

    def _on_gradient(self, param: Any, countdown: GradientCountdown) -> None:
        if self._reducer is None or (self._accumulating and countdown.passes_left > 0):
            return
        left = countdown.passes_left = countdown.passes_left - 1
        if left < 0:
            raise AssertionError(
                f"the gradient of {self._parameter_names[param]!r} was computed more often than "
                f"backward_passes_per_step={self.backward_passes_per_step} times before step(): "
                f"raise backward_passes_per_step to accumulate gradients over more passes"
            )
        self._synchronized = self._seen_by_scaler = False
        if left == 0:
            if self._finite_check is not None:
                self._finite_check.look(param)
            self._reducer.arrived(countdown.index)

    @untraced
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients over `passes` backward passes from now on."""
        check_passes(passes)
        self.backward_passes_per_step = passes
        self._options = replace(self._options, backward_passes_per_step=passes)
        self._reset_passes()

    def _reset_passes(self) -> None:
        for countdown in self._countdowns:
            countdown.passes_left = self.backward_passes_per_step

    @untraced
    def synchronize(self) -> None:
        """Reduce all gradients that are not reduced yet, and wait until they are."""
        if self._finite_check is not None:
            self._finite_check.look_at_rest()
        if self._reducer is not None:
            try:
                self._reducer.finish()
            finally:
                self._reset_passes()
            self._register_hooks()  # for parameters that were frozen before
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are, after `synchronize` was called explicitly."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward passes inside do not count and reduce nothing."""
        earlier, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = earlier

    @calls_traced
    def step(self, closure: Any = None) -> Any:
        """Update the parameters with the gradients of all ranks."""
        if closure is not None:
            return self._step_with(closure)
        if self._reduce_for_step():
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context "
                "after optimizer.synchronize(): it uses the gradients that are reduced "
                "already; write `with optimizer.skip_synchronize(): optimizer.step()` to "
                "say that this is meant",
                stacklevel=3,  # 2 is the wrapper that the mark adds
            )
        return self._base_step()

    @untraced
    def _step_with(self, closure: Any) -> Any:
        notify_scheduler(self)
        loss = self._base_step(self._synchronizing(closure))
        if not capture.is_on():  # then each replay is a step
            runtime.statistics.end_step()
        return loss

    @untraced
    def _reduce_for_step(self) -> bool:
        """Reduce and check the gradients, before the update.

        Returns:
            Whether they had been reduced already, and the user has not said that this is meant.
        """
        notify_scheduler(self)
        is_doubtful = False
        if self._should_synchronize:
            if self._synchronized and self._reducer is not None:
                is_doubtful = not self._seen_by_scaler
            else:
                self.synchronize()
        self._check_gradients()
        # Statistics count a step from here to here, before the update, so that a compiled step is
        # not interrupted once more.
        if not capture.is_on():  # then each replay is a step
            runtime.statistics.end_step()
        return is_doubtful

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: it hooks the base's step

    def _check_gradients(self) -> None:
        """Refuse gradients that are not finite, if HOROVOD_CHECK_NAN asks for that."""
        # A scaler has looked at them itself, and expects infinities now and then. Gradients that
        # were not synchronized are this rank's own: the others take no part in this.
        check = self._synchronized and not self._seen_by_scaler
        self._synchronized = self._seen_by_scaler = False
        if self._finite_check is not None and check:
            self._finite_check.raise_if_found()

    def _prepare_for_scaler(self) -> None:
        """Reduce the gradients, because torch.amp.GradScaler is about to look at them."""
        if self._reducer is not None and not self._synchronized:
            self.synchronize()
        self._seen_by_scaler = True
        if self._finite_check is not None:
            self._finite_check.forget()

    def _share_found(self, found: dict[torch.device, torch.Tensor]) -> Any:
        """Return the scaler's finding: all ranks have the same, because gradients were reduced."""
        return found

    def _synchronizing(self, closure: Any) -> Any:
        """Return `closure` with its gradients reduced each time that the optimizer evaluates it."""

        def evaluate() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
                self._check_gradients()
                if isinstance(self, torch.optim.LBFGS) and self._together is not None:
                    # LBFGS decides by the loss, so all ranks must see the same.
                    mine = torch.as_tensor(loss).detach()
                    return allreduce(mine, op=self.op, process_set=self._together)
            return loss

        return evaluate

    @calls_traced
    def _base_step(self, *arguments: Any) -> Any:
        return super().step(*arguments)

    @untraced
    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Reset the gradients as the user's optimizer does; raise if they are being reduced."""
        if self._reducer is not None and self._reducer.in_flight():
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(), "
                "while gradients are being reduced: they would be lost"
            )
        self._synchronized = self._seen_by_scaler = False
        if self._finite_check is not None:
            self._finite_check.forget()
        super().zero_grad(*arguments, **options)  # some optimizers' own takes no set_to_none

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimize more parameters from now on; all ranks must do so together."""
        if self._reducer is not None and self._reducer.in_flight():
            raise AssertionError("add_param_group() was called between backward() and step()")
        count, problem = len(self.param_groups), None
        try:
            super().add_param_group(param_group)
        except Exception as error:  # the other ranks must hear of it
            problem = error
        named = _pairs(self._parameter_names) + default_names(self.param_groups, first=count)
        options = replace(self._options, named_parameters=named)
        try:
            checked = check_options(self, options, problem)
        except BaseException:
            del self.param_groups[count:]
            raise
        self._remove_hooks()
        self._configure(*checked)

    def _restart(self) -> None:
        """Begin anew with the ranks that are there now, and drop earlier gradients."""
        self._remove_hooks()
        for param in self._parameter_names:
            param.grad = None
        options = replace(self._options, named_parameters=_pairs(self._parameter_names))
        self._configure(*check_options(self, options, agree=False))

    def load_state_dict(self, state_dict: Any) -> None:
        if self._reducer is not None:
            self._reducer.abandon()
        self._synchronized = self._seen_by_scaler = False
        if self._finite_check is not None:
            self._finite_check.forget()
        self._reset_passes()
        super().load_state_dict(state_dict)
        share_groups(self)

    def __reduce__(self) -> Any:
        """Tell pickle and deepcopy what to keep, and how to wrap the copy again."""
        mixin, base = type(self).__bases__
        options = {**vars(self._options), "named_parameters": _pairs(self._parameter_names)}
        chosen = options.pop("process_set")  # copies find theirs by its number
        number = 0 if chosen is global_process_set else chosen.process_set_id
        own = {key: self.__dict__[key] for key in self._kept}
        return _rebuild, (base, mixin, own, options, number)


_optimizers: weakref.WeakSet[ReducingOptimizer] = weakref.WeakSet()


def restart_optimizers() -> None:
    """Let all optimizers of this process begin anew, because an elastic job's ranks changed."""
    for optimizer in list(_optimizers):
        optimizer._restart()


def _rebuild(
    base: Any,
    mixin: type[ReducingOptimizer],
    state: Any,
    options: dict[str, Any],
    process_set_id: int | None,
) -> Any:
    """Unpickle an optimizer, without checks among the ranks: they need not unpickle together."""
    base.__new__(base)._patch_step_function()  # as making one does, so that step hooks run
    optimizer = new_optimizer(base, mixin)
    optimizer.__setstate__(state)
    optimizer._original = _no_original
    chosen = TorchOptions(**options, process_set=_process_set(process_set_id))
    optimizer._configure(*check_options(optimizer, chosen, agree=False))
    return optimizer


def _no_original() -> None:
    """Stands for the reference to the optimizer that was wrapped, where there is none."""


def _process_set(number: int | None) -> ProcessSet:
    if number == 0:
        return global_process_set
    for known in process_sets._registered:
        if known.process_set_id == number:
            return known
    raise ValueError(f"the optimizer belongs to process set {number}, which is not registered here")


def _pairs(names: dict[Parameter, str]) -> list[Named]:
    return [(name, param) for param, name in names.items()]
