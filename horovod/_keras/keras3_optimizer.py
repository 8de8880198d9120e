"""A Keras 3 optimizer that reduces gradients: the part in front of the user's optimizer class.

Keras 3 gives gradients to an optimizer by `apply`, and on JAX by `stateless_apply`, which may or
may not call `apply`. Whichever comes first reduces, and what it calls in turn does not.

A loss scale optimizer must see the gradients of all ranks, or the ranks would not skip the same
steps. So it is the one to reduce when it holds an optimizer of ours, which is what Keras makes of
one by itself under the policy mixed_float16.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from horovod._keras.accumulation import Sums
from horovod._keras.callable_list import CallableList
from horovod._keras.rebuild import derived_class, taken_over
from horovod._keras.reduction import Distribution


class Keras3Optimizer:
    """Mixed in before an optimizer class of Keras 3, with its `Distribution` as `_hvd`."""

    _hvd: Distribution
    _hvd_sums: Sums | None = None  # if the ranks do not exchange the gradients of every pass
    _hvd_handed_over = False  # whether the optimizer that holds this one reduces
    _hvd_has_reduced = False  # whether we have, and call what applies the gradients
    _hvd_hides_sums = False
    built: bool
    _trainable_variables: list[Any]

    # -- steps -----------------------------------------------------------------------------

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        apply = super().apply  # type: ignore[misc]
        if self._hvd_passes_on() or not len(grads):
            return apply(grads, trainable_variables)
        if trainable_variables is not None:
            variables = trainable_variables = list(trainable_variables)
        elif self.built:
            variables = self._trainable_variables
        else:
            return apply(grads)  # says what is missing
        with self._hvd_while("_hvd_has_reduced"):
            if self._hvd.backward_passes_per_step == 1:
                return apply(self._hvd.reduce(grads, variables), trainable_variables)
            if not self.built:
                self.build(variables)
                self.built = True
            assert self._hvd_sums is not None, "made when the optimizer is built"
            return self._hvd_sums.add(grads, variables, apply)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        apply = super().stateless_apply  # type: ignore[misc]
        if self._hvd_passes_on() or not self.built:
            return apply(optimizer_variables, grads, trainable_variables)
        with self._hvd_while("_hvd_has_reduced"):
            if self._hvd_sums is not None:
                return self._hvd_sums.add_stateless(
                    optimizer_variables, grads, trainable_variables, apply
                )
            grads = self._hvd.reduce(grads, self._trainable_variables)
            return apply(optimizer_variables, grads, trainable_variables)

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._hvd.register_local(var)

    def _hvd_passes_on(self) -> bool:
        return self._hvd_handed_over or self._hvd_has_reduced

    @contextlib.contextmanager
    def _hvd_while(self, flag: str) -> Iterator[None]:
        """Have one of our flags set, without Keras noticing."""
        object.__setattr__(self, flag, True)
        try:
            yield
        finally:
            object.__setattr__(self, flag, False)

    # -- what Keras sees ---------------------------------------------------------------------

    def build(self, variables: Any) -> Any:
        result = super().build(variables)  # type: ignore[misc]
        self._hvd_after_build()
        return result

    def _hvd_after_build(self) -> None:
        if (
            self._hvd.backward_passes_per_step > 1
            and self._hvd_sums is None
            and not self._hvd_handed_over
        ):
            object.__setattr__(self, "_hvd_sums", Sums(self))

    @property
    def variables(self) -> CallableList:
        found = super().variables  # type: ignore[misc]
        if self._hvd_hides_sums and self._hvd_sums is not None:
            ours = {id(variable) for variable in self._hvd_sums.variables}
            found = [variable for variable in found if id(variable) not in ours]
        return CallableList(found)

    def save_own_variables(self, store: Any) -> None:
        with self._hvd_while("_hvd_hides_sums"):  # files are those of an optimizer without Horovod
            super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        with self._hvd_while("_hvd_hides_sums"):
            super().load_own_variables(store)  # type: ignore[misc]

    # -- loss scaling ------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "loss_scale_factor":
            # A loss scale optimizer does this when it takes hold of its inner optimizer. Keras
            # gives no other sign of it.
            holder = sys._getframe(1).f_locals.get("self")
            if holder is not self and _is_loss_scaler(holder):
                self._hvd_hand_over(holder)

    def _hvd_hand_over(self, scaler: Any) -> None:
        """Let the loss scale optimizer reduce in our place."""
        if not hasattr(type(scaler), "_hvd"):
            taken_over(scaler, derived_class(type(scaler), Keras3Optimizer, {"_hvd": self._hvd}))
        object.__setattr__(self, "_hvd_handed_over", True)


def _is_loss_scaler(thing: Any) -> bool:
    import keras

    return isinstance(thing, keras.optimizers.LossScaleOptimizer)
