"""The callback that synchronises the ranks' models after local steps, for any Keras.

With ``DistributedOptimizer(..., local_steps=H)`` gradients are averaged as usual until this
callback begins the local steps. So a training without the callback sends more, and is still right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from horovod._keras.arrays import to_numpy, to_torch
from horovod._keras.callbacks import HorovodCallback
from horovod._keras.distribution import Distribution
from horovod._keras.flavour import backend_of
from horovod._keras.variables import (
    optimizer_variables,
    raise_errors_of,
    read_values,
    write_values,
)
from horovod.common.local_steps import AVERAGING, OuterSGD, check_alike
from horovod.engine.arguments import set_size
from horovod.torch.compression import (
    BF16Compressor,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from horovod.torch.mpi_ops import broadcast_
from horovod.torch.ops.objects import allgather_object, broadcast_object
from horovod.torch.optimizers.exchanger import Exchanger

Tensor = torch.Tensor


class LocalStepsCallbackBase(HorovodCallback):
    """Lets ranks take the local steps that the model's optimizer was made with, in `fit`.

    It counts steps, synchronises the ranks' weights every `local_steps` of them, and averages them
    once more when training ends. The optimizer must be a `DistributedOptimizer(local_steps=...)`.
    All ranks must take equally many steps.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, local_steps=50, outer=hvd.OuterSGD())
        >>> model.compile(optimizer, loss="mse")
        >>> model.fit(x, y, callbacks=[hvd.callbacks.LocalStepsCallback()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0  # those of the warm-up included
        self._since = 0  # local steps since the last synchronisation
        self._first_batch = 0
        # Where the ranks were after the last synchronisation; None before local steps begin.
        self._anchor: list[Tensor] | None = None
        self._momentum: list[Tensor] | None = None
        self._distribution = Distribution()

    # -- when ------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        found = distribution_of(model.optimizer)
        if found is None or found.schedule.local_steps is None:
            raise ValueError(
                "LocalStepsCallback needs an optimizer with local steps: compile the model with "
                "hvd.DistributedOptimizer(optimizer, local_steps=...)"
            )
        self._distribution = found
        with raise_errors_of(backend_of(model)):
            self._agree()
        self._begin_if_due(model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Several batches where Keras runs them at once (steps_per_execution).
        count = batch - self._first_batch + 1
        self._steps += count
        schedule = self._distribution.schedule
        if not self._distribution.is_local:
            if self._steps >= schedule.warmup_steps:
                self._begin_if_due(self.model)
            return
        self._since += count
        if self._since >= schedule.steps:
            self._synchronise(self.model, schedule.outer_sgd)

    def on_train_end(self, logs: Any = None) -> None:
        if not self._distribution.is_local:
            return
        if self._since:
            self._synchronise(self.model, AVERAGING)
        self._anchor = None  # the next training may begin with other weights
        self._use_local_gradients(self.model, False)

    def _begin_if_due(self, model: Any) -> None:
        """Begin local steps after the warm-up, as soon as the model has weights."""
        if self._steps < self._distribution.schedule.warmup_steps or not model.trainable_weights:
            return
        with raise_errors_of(backend_of(model)):
            self._begin(model)
        self._use_local_gradients(model, True)

    def _use_local_gradients(self, model: Any, is_local: bool) -> None:
        self._distribution.is_local = is_local
        model.train_function = None  # a compiled step has the other way in it
        model.make_train_function(force=True)

    # -- what ------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Refuse ranks with other settings, and let all count from where rank 0 is. Collective."""
        process_set = self._distribution.process_set
        settings = self._distribution.schedule.settings()
        everyone = allgather_object(settings, "local_steps.agreement", process_set)
        check_alike(process_set.ranks or range(set_size(process_set)), everyone)
        counts = self._steps, self._since
        self._steps, self._since = broadcast_object(
            counts, self._root, "local_steps.counts", process_set
        )

    @property
    def _root(self) -> int:
        ranks = self._distribution.process_set.ranks
        return ranks[0] if ranks else 0

    def _begin(self, model: Any) -> None:
        """Make where the root is, and its outer momentum, the beginning of all ranks."""
        is_new = self._anchor is None
        if self._anchor is None:
            self._anchor = _wide(read_values(model.trainable_weights, model))
        if self._distribution.schedule.outer_sgd.momentum and self._momentum is None:
            self._momentum = [torch.zeros_like(tensor) for tensor in self._anchor]
        for number, tensor in enumerate([*self._anchor, *(self._momentum or ())]):
            name = f"local_steps.anchor.{number}"
            broadcast_(tensor, self._root, name, self._distribution.process_set)
        if is_new:
            self._write_anchor(model)

    def _synchronise(self, model: Any, outer: OuterSGD) -> None:
        """Take an outer step with how far the ranks have moved, on average. Collective."""
        assert self._anchor is not None
        with raise_errors_of(backend_of(model)):
            values = _wide(read_values(model.trainable_weights, model))
            moved = [old.sub_(new) for old, new in zip(_copies(self._anchor), values, strict=True)]
            self._average(moved, "local_steps", torch_compression(self._distribution.compression))
            momenta = self._momentum if outer.momentum else None
            for index, (anchor, gradient) in enumerate(zip(self._anchor, moved, strict=True)):
                outer.update(anchor, gradient, None if momenta is None else momenta[index])
            self._write_anchor(model)
            if self._distribution.schedule.average_state:
                self._average_state(model)
        self._since = 0

    def _average_state(self, model: Any) -> None:
        variables = [
            variable
            for variable in optimizer_variables(model.optimizer)
            if len(variable.shape) > 0 and "float" in str(variable.dtype)
        ]
        values = read_values(variables, model)
        averages = _wide(values)
        self._average(averages, "local_steps.state", NoneCompressor)
        write_values(variables, _like(averages, values), model)

    def _average(self, tensors: list[Tensor], name: str, compression: type[Compressor]) -> None:
        """Average tensors over the ranks in place, those of one type as one exchange."""
        exchanger = Exchanger(self._distribution.process_set, compression, None)
        exchanger.require_all(f"{name}.all", background=False)()
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            # Nothing here is sent by a hook, so that nobody needs to know the parameters.
            exchanger.start(f"{name}.{dtype}", [], flat, background=False)()
            for tensor, part in zip(
                alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True
            ):
                tensor.copy_(part.view(tensor.shape))

    def _write_anchor(self, model: Any) -> None:
        assert self._anchor is not None
        values = read_values(model.trainable_weights, model)
        write_values(model.trainable_weights, _like(self._anchor, values), model)

    # -- checkpoints -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on bit for bit, beside this rank's model and optimizer.

        Between synchronisations ranks differ: let each save its own.
        """

        def arrays(tensors: list[Tensor] | None) -> list[Any] | None:
            return None if tensors is None else [tensor.numpy().copy() for tensor in tensors]

        return {
            "steps": self._steps,
            "since": self._since,
            "anchor": arrays(self._anchor),
            "momentum": arrays(self._momentum),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; to be called before `fit`."""

        def tensors(arrays: list[Any] | None) -> list[Tensor] | None:
            return None if arrays is None else [torch.tensor(array) for array in arrays]

        self._steps, self._since = state_dict["steps"], state_dict["since"]
        self._anchor = tensors(state_dict["anchor"])
        self._momentum = tensors(state_dict["momentum"])


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return how an optimizer, or the one inside it, is distributed; None if it is not."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        found: Distribution | None = getattr(type(each), "_hvd", None)
        if found is not None:
            return found
    return None


def torch_compression(compression: Any) -> type[Compressor]:
    """Return the compressor for torch's tensors that does what a backend's own one does."""
    if compression is None:
        return NoneCompressor
    for ours in (FP16Compressor, BF16Compressor, NoneCompressor):
        if compression.__name__ == ours.__name__:
            return ours
    return compression


def _wide(values: list[Any]) -> list[Tensor]:
    """Copy values to float32 at least: many small outer steps must add up."""
    tensors = [to_torch(np.array(value)) for value in values]
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _like(tensors: list[Tensor], values: list[Any]) -> list[Any]:
    """Return the tensors as arrays of the types and shapes of `values`."""
    return [
        to_numpy(tensor.to(to_torch(value).dtype, copy=True).view(value.shape), value)
        for tensor, value in zip(tensors, values, strict=True)
    ]
