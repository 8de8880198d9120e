"""The callback that synchronises the ranks' models after local steps, for any Keras.

With ``DistributedOptimizer(..., local_steps=H)`` gradients are averaged as usual until this
callback begins the local steps. Training without the callback sends more, but is still correct.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from horovod._keras.callbacks import HorovodCallback
from horovod._keras.flavour import backend_of
from horovod._keras.optimizer import distribution_of, reduction_among
from horovod._keras.reduction import Distribution
from horovod._keras.variables import (
    optimizer_variables,
    raise_errors_of,
    read_values,
    to_numpy,
    to_torch,
    write_values,
)
from horovod.common.local_steps import AVERAGING, HOST, OuterSGD, check_alike
from horovod.engine.arguments import set_size
from horovod.torch.compression import (
    BF16Compressor,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from horovod.torch.functions import replace_nested
from horovod.torch.ops.objects import allgather_object, broadcast_object
from horovod.torch.optimizers.exchanger import Exchanger
from horovod.torch.optimizers.fragments import (
    Content,
    Fragment,
    load_fragments,
    make_fragments,
    take_turns,
)
from horovod.torch.optimizers.local_steps import set_of_this_host

Tensor = torch.Tensor
Mirrored = tuple[Any, Tensor]  # a variable, and a tensor in host memory for its values


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
        self._steps = 0  # counts steps, including those of the warm-up
        self._local_steps = 0  # counts local steps of this training
        self._first_batch = 0
        self._has_begun = False  # whether this training has come to its local steps
        self._fragments: list[Fragment] = []  # consist of tensors that mirror the model's weights
        self._mirror: dict[str, Mirrored] = {}  # the weights, by their names in the fragments
        self._state: list[Mirrored] = []  # the optimizer's, averaged with fragment 0
        self._saved: list[Content] | None = None  # for the fragments of the next training
        self._distribution: Distribution
        self._other_reduction: Any = None  # the reduction that is not in use, with `within`

    # -- the schedule ----------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        distribution = distribution_of(model.optimizer)
        if distribution is None or distribution.options.schedule.local_steps is None:
            raise ValueError(
                "LocalStepsCallback needs an optimizer with local steps: compile the model with "
                "hvd.DistributedOptimizer(optimizer, local_steps=...)"
            )
        self._distribution = distribution
        with raise_errors_of(backend_of(model)):
            self._agree()
            within = distribution.options.schedule.within
            if within is not None:
                cluster = set_of_this_host() if within == HOST else within
                self._other_reduction = reduction_among(cluster, distribution, model.optimizer)
        self._begin_if_due(model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Several batches where Keras runs them at once (steps_per_execution).
        count = batch - self._first_batch + 1
        self._steps += count
        schedule = self._distribution.options.schedule
        if not self._has_begun:
            if self._steps >= schedule.warmup_steps:
                self._begin_if_due(self.model)
            return
        self._local_steps += count
        with raise_errors_of(backend_of(self.model)):
            take_turns(self._fragments, self._local_steps, schedule, self._start, self._apply)

    def on_train_end(self, logs: Any = None) -> None:
        if not self._has_begun:
            return
        schedule = self._distribution.options.schedule
        with raise_errors_of(backend_of(self.model)):
            for fragment in self._fragments:
                if fragment.apply_at is not None:
                    self._apply(fragment)
            for fragment in self._fragments:
                self._start(fragment, delay=0)
                self._update(fragment, AVERAGING, local_share=0.0)
        # The next training may begin with other weights.
        self._saved = [
            {**fragment.content(), "anchors": {}, "start_at": schedule.first_turn(fragment.number)}
            for fragment in self._fragments
        ]
        self._local_steps = 0
        self._use_local_gradients(self.model, False)

    def _begin_if_due(self, model: Any) -> None:
        """Begin local steps after the warm-up, as soon as the model has weights."""
        warmup_steps = self._distribution.options.schedule.warmup_steps
        if self._steps < warmup_steps or not model.trainable_weights:
            return
        self._mirror_weights(model)
        with raise_errors_of(backend_of(model)):
            self._begin()
        self._use_local_gradients(model, True)

    def _use_local_gradients(self, model: Any, is_local: bool) -> None:
        self._has_begun = is_local
        if self._distribution.options.schedule.within is None:
            self._distribution.is_local = is_local
        else:
            reduction = self._distribution.reduce
            self._distribution.reduce = self._other_reduction
            self._other_reduction = reduction
        model.train_function = None  # the compiled step contains the reduction that ends now
        model.make_train_function(force=True)

    # -- a synchronisation -----------------------------------------------------------------

    def _agree(self) -> None:
        """Refuse ranks with other settings; give all ranks the root's step counts. Collective."""
        process_set = self._distribution.options.process_set
        settings = self._distribution.options.schedule.settings()
        everyone = allgather_object(settings, "local_steps.agreement", process_set)
        check_alike(process_set.ranks or range(set_size(process_set)), everyone)
        counts = self._steps, self._local_steps
        self._steps, self._local_steps = broadcast_object(
            counts, self._root, "local_steps.counts", process_set
        )

    @property
    def _root(self) -> int:
        ranks = self._distribution.options.process_set.ranks
        return ranks[0] if ranks else 0

    def _mirror_weights(self, model: Any) -> None:
        """Make tensors for the weights, and divide these by layers.

        Names of weights depend on how many models a process has made, so numbers stand for them.
        """
        layers: dict[str, int] = {}
        self._mirror = {}
        for number, mirrored in enumerate(_mirrored(list(model.trainable_weights), model)):
            path = str(getattr(mirrored[0], "path", mirrored[0].name))
            layer = layers.setdefault(path.rpartition("/")[0] or path, len(layers))
            self._mirror[f"{layer}.{number}"] = mirrored
        named: list[Any] = [(name, tensor) for name, (_, tensor) in self._mirror.items()]
        self._fragments = make_fragments(named, self._distribution.options.schedule)

    def _begin(self) -> None:
        """Let all ranks begin with the root's weights and outer momentum. Collective."""
        process_set = self._distribution.options.process_set
        is_new = self._saved is None or not any(each["anchors"] for each in self._saved)
        self._mirror_state()
        saved = broadcast_object(self._saved, self._root, "local_steps.progress", process_set)
        if saved is not None:
            load_fragments(self._fragments, saved, self._others)
        for fragment in self._fragments:
            if not fragment.has_anchor:
                name = f"local_steps.{fragment.number}"
                fragment.take_anchor(self._root, name, process_set)
            if is_new:
                for piece in fragment.pieces:
                    piece.write_parameters()
                self._write(self._mirror_of(fragment))
        self._saved = None

    def _start(self, fragment: Fragment, delay: int) -> None:
        """Send how far this rank has moved; with fragment 0, the optimizer's state too."""
        if fragment.number == 0:
            self._mirror_state()
        self._read(self._mirror_of(fragment))
        compression = torch_compression(self._distribution.options.compression)
        exchanger = Exchanger(self._distribution.options.process_set, compression, None)
        fragment.start("local_steps", exchanger, self._others(fragment), delay)

    def _apply(self, fragment: Fragment) -> None:
        schedule = self._distribution.options.schedule
        self._update(fragment, schedule.outer_sgd, schedule.local_share)
        fragment.start_at += schedule.steps

    def _update(self, fragment: Fragment, outer: OuterSGD, local_share: float) -> None:
        """Take an outer step by the average of how far the ranks have moved."""
        mirrored = self._mirror_of(fragment)
        self._read(mirrored)
        fragment.apply(outer, local_share)
        self._write(mirrored)

    # -- weights in host memory ------------------------------------------------------------

    def _mirror_state(self) -> None:
        """Make tensors for the optimizer's state, if that is averaged."""
        if self._distribution.options.schedule.average_state:
            variables = [
                variable
                for variable in optimizer_variables(self.model.optimizer)
                if len(variable.shape) > 0 and "float" in str(variable.dtype)
            ]
            self._state = _mirrored(variables, self.model)

    def _others(self, fragment: Fragment) -> list[Tensor]:
        """Return what is averaged beside the fragment's weights."""
        return [tensor for _, tensor in self._state] if fragment.number == 0 else []

    def _mirror_of(self, fragment: Fragment) -> list[Mirrored]:
        mirrored = [self._mirror[name] for name, _ in fragment.members]
        return mirrored + self._state if fragment.number == 0 else mirrored

    def _read(self, mirrored: list[Mirrored]) -> None:
        values = read_values([variable for variable, _ in mirrored], self.model)
        for (_, tensor), value in zip(mirrored, values, strict=True):
            tensor.copy_(to_torch(value))

    def _write(self, mirrored: list[Mirrored]) -> None:
        variables = [variable for variable, _ in mirrored]
        values = [
            to_numpy(tensor.clone(), value).reshape(value.shape)
            for (_, tensor), value in zip(mirrored, read_values(variables, self.model), strict=True)
        ]
        write_values(variables, values, self.model)

    # -- checkpoints -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on bit for bit, beside this rank's model and optimizer.

        Between synchronisations ranks differ: let each save its own.
        """
        contents: Any = self._saved
        if self._has_begun:
            contents = [fragment.content() for fragment in self._fragments]
        return {
            "steps": self._steps,
            "local_steps": self._local_steps,
            # bfloat16, which numpy lacks, occurs in the optimizer's state alone.
            "fragments": replace_nested(
                contents, Tensor, lambda tensor: _wide(tensor).numpy().copy()
            ),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; call it before `fit`."""
        self._steps, self._local_steps = state_dict["steps"], state_dict["local_steps"]
        self._saved = replace_nested(state_dict["fragments"], np.ndarray, torch.tensor)


def torch_compression(compression: Any) -> type[Compressor]:
    """Return the compressor for torch's tensors that does what a backend's own one does."""
    for ours in (FP16Compressor, BF16Compressor, NoneCompressor):
        if compression.__name__ == ours.__name__:
            return ours
    return compression


def _mirrored(variables: list[Any], model: Any) -> list[Mirrored]:
    """Return variables with copies of their values in host memory."""
    values = read_values(variables, model)
    return [
        (variable, to_torch(value).clone())
        for variable, value in zip(variables, values, strict=True)
    ]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor
