"""Elastic training with Keras, on whatever backend, and what TensorFlow's own states share with it.

`horovod.keras.elastic`, `horovod.tensorflow.keras.elastic` and `horovod.tensorflow.elastic` offer
these to users. The loop, and what a failure costs, are `horovod.common.elastic`'s.

The values of variables are kept as torch tensors in host memory, because that is what the engine
sends. A commit copies them there, into memory that is used again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from horovod._keras.callbacks import HorovodCallback
from horovod._keras.flavour import backend_of
from horovod._keras.rebuild import has_state
from horovod._keras.variables import optimizer_variables
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    error_in_text,
)
from horovod.elastic.worker import this_worker
from horovod.engine.basics import HorovodBasics
from horovod.engine.runtime import runtime
from horovod.torch.elastic.snapshot import Snapshots
from horovod.torch.objects import broadcast_object
from horovod.torch.parameters import broadcast_parameters

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

_basics = HorovodBasics()


# -- the loop ------------------------------------------------------------------------------------


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate the training function `func`, whose first argument is the state.

    It is called again with the state of the last commit when a rank is lost, and with the present
    state when ranks come or go. Collectives belong inside of it: a rank that joins later begins
    there. Without an elastic launcher it is a plain call.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state): ...
    """

    @functools.wraps(func)
    def with_our_errors(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with _our_errors():
            return func(state, *args, **kwargs)

    return run_fn(with_our_errors, _reset, this_worker)


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    """Raise as `HorovodInternalError` what a framework makes of it."""
    try:
        yield
    except (HorovodInternalError, HostsUpdatedInterrupt):
        raise
    except Exception as error:
        ours = error_in_text(error)
        if ours is None:
            raise
        raise ours from error


def _reset() -> None:
    _basics.shutdown()
    _basics.init()


# -- states --------------------------------------------------------------------------------------


class VariablesState(ObjectState):
    """Attributes, as in `ObjectState`, and variables of a framework."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, lambda: runtime.topology.rank, **kwargs)
        self._snapshots = Snapshots()
        self._saved_variables: list[Any] = []  # those of the snapshot
        self.save()

    @abstractmethod
    def _shared_variables(self) -> list[Any]:
        """Those that are the same on all ranks."""

    def _own_variables(self) -> list[Any]:
        """Those that each rank has for itself."""
        return []

    @abstractmethod
    def _read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """The variables' values; may be views of their memory."""

    @abstractmethod
    def _write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Assign values, whose memory the variables may keep."""

    def on_reset(self) -> None:
        with _our_errors():  # there are scripts whose callbacks train a step
            super().on_reset()

    def save(self) -> None:
        variables = [*self._shared_variables(), *self._own_variables()]
        self._snapshots.prepare(self._read(variables))
        super().save()
        self._snapshots.publish()
        self._saved_variables = variables

    def restore(self) -> None:
        assert self._snapshots.current is not None, "taken by the constructor"
        values = self._snapshots.current.content
        self._write(self._saved_variables, [value.clone() for value in values])
        super().restore()

    def sync(self) -> None:
        variables = self._shared_variables()
        values = self._read(variables)
        self._check_forms(variables, values)
        if runtime.topology.rank != self._root:  # the variables change when everything has come
            contiguous = torch.contiguous_format
            values = [torch.empty_like(value, memory_format=contiguous) for value in values]
        parts = {f"elastic.variable.{i:06}": _bytes(value) for i, value in enumerate(values)}
        broadcast_parameters(parts, self._root)
        if runtime.topology.rank != self._root:
            self._write(variables, values)
        super().sync()
        self.save()  # a failure before the next commit must not bring back what was before

    def _check_forms(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """`ValueError` on a rank whose variables cannot take the root's values.

        Only there: the others go on without it.
        """
        ours = [(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in values]
        roots = self._bcast_object(ours, root_rank=self._root)
        if ours == roots:
            return
        if len(ours) != len(roots):
            problem = f"{len(ours)} variables, and rank {self._root} has {len(roots)}"
        else:
            place = next(place for place, form in enumerate(ours) if form != roots[place])
            variable = variables[place]
            problem = (
                f"the variable {getattr(variable, 'path', variable.name)} of type and shape "
                f"{ours[place]}, and rank {self._root} has {roots[place]} in its place"
            )
        raise ValueError(
            f"the states of the ranks differ: rank {runtime.topology.rank} has {problem}. All "
            f"ranks must make the same model and optimizer"
        )


class KerasStateBase(VariablesState):
    """A Keras model, its optimizer, and attributes: ``KerasState(model, epoch=0, batch=0)``.

    Args:
        model: A Keras model that is built.
        optimizer: The model's unless another is given; it is built for the model's trainable
            variables if it is not yet, so that it can receive its state.

    Raises:
        ValueError: The model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                f"the model {model.name!r} has no variables yet: give it an Input layer, or call "
                f"model.build(input_shape) or model(some_data) before making its elastic state"
            )
        self.model = model
        self._given_optimizer = optimizer
        super().__init__(**kwargs)

    @property
    def optimizer(self) -> Any:
        if self._given_optimizer is not None:
            return self._given_optimizer
        return getattr(self.model, "optimizer", None)

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._given_optimizer = optimizer

    def restore(self) -> None:
        if hasattr(self.model, "jax_state_sync"):
            # What went into a step that failed is gone: for the metrics there are new ones, and
            # the values that Keras would put into the variables at the next occasion are of no use.
            self.model._jax_state = None
            self.model.reset_metrics()
            programs = sys.modules.get("horovod.jax.primitive")
            if programs is not None:  # a step that failed must not let the next fail
                programs.forget_programs()
        super().restore()

    def _shared_variables(self) -> list[Any]:
        model, optimizer = self.model, self.optimizer
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()  # JAX has them elsewhere during an epoch
        if optimizer is None:
            return list(model.weights)
        _build(optimizer, model)
        variables = [*model.weights, *optimizer_variables(optimizer)]
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if hasattr(inner, "_hvd_unfinished"):
            variables += inner._hvd_unfinished(model.trainable_variables)
        return variables

    def _own_variables(self) -> list[Any]:
        weights = {id(variable) for variable in self.model.weights}
        # The states of random generators, where Keras keeps them in variables.
        return [variable for variable in self.model.variables if id(variable) not in weights]

    def _read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        backend = backend_of(self.model)
        if backend == "tensorflow":
            from horovod.tensorflow.variables import read_variables

            return read_variables(variables)
        if backend == "torch":
            return [variable.value.detach() for variable in variables]
        import jax

        host = jax.devices("cpu")[0]
        return [from_dlpack(jax.device_put(each.value, host)) for each in variables]

    def _write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        backend = backend_of(self.model)
        if backend == "tensorflow":
            from horovod.tensorflow.variables import write_variables

            write_variables(variables, values)
            return
        for variable, value in zip(variables, values, strict=True):
            if backend == "jax":
                import jax
                import numpy as np

                variable.assign(np.asarray(jax.dlpack.from_dlpack(value)))
            else:
                variable.assign(value)


def _build(optimizer: Any, model: Any) -> None:
    """Have an optimizer make all that it keeps now, instead of in its first step."""
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    elif not has_state(optimizer):
        optimizer.build(model.trainable_variables)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# -- callbacks: combined with the Callback class of a Keras by the modules that export them --------


class CommitStateCallbackBase(HorovodCallback):
    """Commits `state` every `batches_per_commit` batches and at the end of every epoch.

    Put it behind callbacks that change the state, so that what they do is committed as well.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be at least 1, not {batches_per_commit}")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches = 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches == self.batches_per_commit:
            self._batches = 0
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class _EpochIsComplete:
    """What `stop_training` is set to when the rest of the epoch, but no more, is to be left out."""


_EPOCH_IS_COMPLETE = _EpochIsComplete()


class UpdateBatchStateCallbackBase(HorovodCallback):
    """Keeps in ``state.batch`` of `state` how many batches of the epoch are done.

    An epoch that begins with some done, because the ranks changed in the middle of it, is shorter
    by as many, if Keras knows the number of steps.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        _check_has(state, "batch")
        self.state = state
        self._done_before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done_before = self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._done_before + batch + 1
        steps = self.params.get("steps")
        if self._done_before and steps is not None and self.state.batch >= steps:
            self.model.stop_training = self.model.stop_training or _EPOCH_IS_COMPLETE

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0
        if self._done_before and self.model.stop_training is _EPOCH_IS_COMPLETE:
            self.model.stop_training = False


class UpdateEpochStateCallbackBase(HorovodCallback):
    """Keeps in ``state.epoch`` of `state` how many epochs are done, over all calls of `fit`.

    Call ``fit(epochs=total - state.epoch)``, or ``fit(epochs=total, initial_epoch=state.epoch)``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        _check_has(state, "epoch")
        self.state = state
        self._done_before: int = state.epoch
        self._first: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._done_before, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._done_before + epoch + 1 - (self._first or 0)


def _check_has(state: State, name: str) -> None:
    if not hasattr(state, name):
        raise ValueError(
            f"the state has no {name!r} to keep: make it with KerasState(model, {name}=0)"
        )
