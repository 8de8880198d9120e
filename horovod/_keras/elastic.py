"""Elastic training with Keras on any backend, and the base of TensorFlow's own states.

`horovod.keras.elastic`, `horovod.tensorflow.keras.elastic` and `horovod.tensorflow.elastic` offer
these classes to users. The loop around the training function is in `horovod.common.elastic`.

A commit keeps the values of variables as torch tensors in host memory, because the engine sends
such tensors. The next commit uses the same memory again.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from horovod._keras.callbacks import HorovodCallback
from horovod._keras.flavour import backend_of
from horovod._keras.rebuild import has_state
from horovod._keras.variables import optimizer_variables
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import raise_our_errors
from horovod.elastic.worker import this_worker
from horovod.engine.basics import HorovodBasics
from horovod.engine.runtime import runtime
from horovod.torch.elastic.snapshot import Snapshots
from horovod.torch.functions import broadcast_parameters
from horovod.torch.ops.objects import broadcast_object

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

_basics = HorovodBasics()


# -- the loop ------------------------------------------------------------------------------------


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate the training function `func`, whose first argument is the state.

    When a rank is lost, the function is called again with the state of the last commit. When ranks
    are added or removed in an orderly way, it is called again with the present state. All
    collectives belong inside it, because a rank that joins later begins there. Without an elastic
    launcher the decorated function is called once, as usual.

    Args:
        func: The training function.

    Returns:
        The decorated function.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state): ...
    """
    return run_fn(raise_our_errors()(func), _reset, this_worker)


def _reset() -> None:
    """Initialise Horovod again, with the ranks that are there now."""
    _basics.shutdown()
    _basics.init()


# -- states --------------------------------------------------------------------------------------


class VariablesState(ObjectState):
    """A state of attributes, as in `ObjectState`, and of a framework's variables."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, lambda: runtime.topology.rank, **kwargs)
        self._snapshots = Snapshots()
        self._saved_variables: list[Any] = []  # the variables whose values the snapshot has
        self.save()

    @abstractmethod
    def _shared_variables(self) -> list[Any]:
        """Return the variables that have the same values on all ranks."""

    def _own_variables(self) -> list[Any]:
        """Return the variables whose values differ between ranks."""
        return []

    @abstractmethod
    def _read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """Return the variables' values, possibly as views of their memory."""

    @abstractmethod
    def _write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Assign values, whose memory the variables may keep."""

    def on_reset(self) -> None:
        with raise_our_errors():  # some scripts train a step in their reset callbacks
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
        if runtime.topology.rank != self._root:
            # Receive into new memory: the variables change only once everything has arrived.
            contiguous = torch.contiguous_format
            values = [torch.empty_like(value, memory_format=contiguous) for value in values]
        parts = {f"elastic.variable.{i:06}": _bytes(value) for i, value in enumerate(values)}
        broadcast_parameters(parts, self._root)
        if runtime.topology.rank != self._root:
            self._write(variables, values)
        super().sync()
        self.save()  # so that a failure before the next commit does not restore older values

    def _check_forms(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if this rank's variables cannot take the root's values.

        Only such a rank raises it; the others continue without that rank.
        """
        ours = [(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in values]
        roots = self._bcast_object(ours, root_rank=self._root)
        if ours == roots:
            return
        if len(ours) != len(roots):
            problem = f"{len(ours)} variables, and rank {self._root} has {len(roots)}"
        else:
            index = next(index for index, form in enumerate(ours) if form != roots[index])
            variable = variables[index]
            problem = (
                f"the variable {getattr(variable, 'path', variable.name)} of type and shape "
                f"{ours[index]}, and rank {self._root} has {roots[index]} in its place"
            )
        raise ValueError(
            f"the states of the ranks differ: rank {runtime.topology.rank} has {problem}. All "
            f"ranks must make the same model and optimizer"
        )


class KerasStateBase(VariablesState):
    """The state of a Keras model, its optimizer, and attributes.

    Args:
        model: A Keras model that is built.
        optimizer: The optimizer; the model's own by default. If it is not built yet, it is built
            for the model's trainable variables, so that it can receive its state.
        **kwargs: Attributes with their initial values, such as ``epoch=0, batch=0``.

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
            # A step that failed has consumed its input arrays. So the metrics start anew, and the
            # values that Keras would write back into the variables are dropped.
            self.model._jax_state = None
            self.model.reset_metrics()
            programs = sys.modules.get("horovod.jax.compiled.primitive")
            if programs is not None:  # otherwise the failed step's error would end the next step
                programs.forget_programs()
        super().restore()

    def _shared_variables(self) -> list[Any]:
        model, optimizer = self.model, self.optimizer
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()  # during an epoch the current values are not in the variables
        if optimizer is None:
            return list(model.weights)
        _build(optimizer, model)
        variables = [*model.weights, *optimizer_variables(optimizer)]
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if hasattr(inner, "_hvd_pending_variables"):
            variables += inner._hvd_pending_variables(model.trainable_variables)
        return variables

    def _own_variables(self) -> list[Any]:
        weights = {id(variable) for variable in self.model.weights}
        # These are the states of random generators, where Keras keeps them in variables.
        return [variable for variable in self.model.variables if id(variable) not in weights]

    def _read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        backend = backend_of(self.model)
        if backend == "tensorflow":
            from horovod.tensorflow.ops.bridge import read_variables

            return read_variables(variables)
        if backend == "torch":
            return [variable.value.detach() for variable in variables]
        import jax

        host = jax.devices("cpu")[0]
        return [from_dlpack(jax.device_put(each.value, host)) for each in variables]

    def _write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        backend = backend_of(self.model)
        if backend == "tensorflow":
            from horovod.tensorflow.ops.bridge import write_variables

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
    """Let an optimizer make all its variables now instead of in its first step."""
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    elif not has_state(optimizer):
        optimizer.build(model.trainable_variables)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as bytes: a broadcast need not know types."""
    return tensor.reshape(-1).view(torch.uint8)


# -- callbacks: combined with the Callback class of a Keras by the modules that export them --------


class CommitStateCallbackBase(HorovodCallback):
    """Commits the state every few batches and at the end of every epoch.

    Put it after callbacks that change the state, so that the commit contains their changes.

    Args:
        state: The elastic state to commit.
        batches_per_commit: The number of batches between commits; 1 by default.

    Raises:
        ValueError: `batches_per_commit` is less than 1.
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


_EPOCH_IS_COMPLETE = object()  # a true value for `stop_training` that ends this epoch only


class UpdateBatchStateCallbackBase(HorovodCallback):
    """Keeps the number of batches done in the epoch in ``state.batch``.

    If the ranks changed in the middle of an epoch, the new `fit` begins with some batches done. The
    epoch is then shorter by this number, if Keras knows the number of steps.

    Args:
        state: The elastic state, made with ``KerasState(model, batch=0)``.

    Raises:
        ValueError: The state has no `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        _check_attribute(state, "batch")
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
    """Keeps the number of epochs done, over all calls of `fit`, in ``state.epoch``.

    Call ``fit(epochs=total - state.epoch)``, or ``fit(epochs=total, initial_epoch=state.epoch)``.

    Args:
        state: The elastic state, made with ``KerasState(model, epoch=0)``.

    Raises:
        ValueError: The state has no `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        _check_attribute(state, "epoch")
        self.state = state
        self._done_before: int = state.epoch
        self._first_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._done_before, self._first_epoch = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._first_epoch is None:
            self._first_epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._done_before + epoch + 1 - (self._first_epoch or 0)


def _check_attribute(state: State, name: str) -> None:
    """Raise ValueError if the state has no attribute of this name."""
    if not hasattr(state, name):
        raise ValueError(
            f"the state has no {name!r} to keep: make it with KerasState(model, {name}=0)"
        )
