"""`DistributedGradientTape`: a tape whose gradients are reduced over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.optimizer_options import OptimizerOptions, weights_of
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradients import Done, GradientReduction, mark
from horovod.tensorflow.ops.bridge import without_autograph

_Pairs = list[tuple[Any, Any]]


class _Distributed:
    """The mixin for the class of a tape.

    The wrapped tape does the work. The two share their `__dict__`, so it does not matter which of
    them records, or when the tape is wrapped. Our own attributes are in slots.
    """

    __slots__ = ("_plain", "_reduction")

    _plain: tf.GradientTape
    _reduction: GradientReduction

    @without_autograph
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the gradients of `tf.GradientTape.gradient`, reduced over all ranks.

        Ranks match gradients by the order of `sources`. So `use_generic_names`, which upstream has
        for models whose names differ between ranks, changes nothing here.
        """
        gradients = self._plain.gradient(target, sources, output_gradients, unconnected_gradients)
        variables = tf.nest.flatten(sources)
        reduced = self._reduction(tf.nest.flatten(gradients), variables)
        mark(reduced, variables, Done.REDUCED)
        return tf.nest.pack_sequence_as(sources, reduced)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Return the jacobian of this rank alone; it is not reduced."""
        return self._plain.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batch jacobian of this rank alone; it is not reduced."""
        return self._plain.batch_jacobian(*args, **kwargs)

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of this source."""
        self._reduction.register_local(source)

    @without_autograph
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[_Pairs, _Pairs]:
        """Return the pairs (source, gradient) of local sources, and those of reduced sources."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs: tuple[_Pairs, _Pairs] = [], []
        for pair in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True):
            pairs[0 if self._reduction.is_local(pair[0]) else 1].append(pair)
        return pairs


@functools.cache
def _distributed_class(tape_class: Any) -> Any:
    return type(tape_class.__name__, (_Distributed, tape_class), {})


@without_autograph
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape like `gradtape` whose `gradient` reduces gradients over all ranks.

    Args:
        gradtape: A tf.GradientTape.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: A compressor for what is sent, such as `Compression.fp16`; none by default.
        sparse_as_dense: Whether to turn sparse gradients into dense ones; False by default.
        op: `Average` (the default), `Sum` or `Adasum`.
        gradient_predivide_factor: Divide gradients by this factor before the sum and by `size /
            factor` after it; the result is still the average. 1.0 by default.
        num_groups: Older form of `groups`.
        groups: The number of groups in which gradients are reduced, or lists of variables that form
            a group; None (the default) for a single group.
        process_set: The ranks to reduce with, all by default; others keep their own gradients.
        scale_local_gradients: Whether to divide gradients that stay on their rank by the number of
            ranks; True by default.

    Returns:
        A tape that records like `gradtape` and shares its state.

    Raises:
        ValueError: An argument is wrong, or the tape is distributed already.

    Examples:
        >>> with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        ...     loss = loss_of(model(images), labels)
    """
    return _distributed_tape(gradtape, OptimizerOptions.from_arguments(locals()))


@without_autograph
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that does not reduce the gradients of `local_layers`.

    All arguments but `local_layers` are those of `DistributedGradientTape`, which explains them:
    `gradtape`, `device_dense`, `device_sparse`, `compression`, `sparse_as_dense`, `op`,
    `gradient_predivide_factor`, `num_groups`, `groups`, `process_set` and `scale_local_gradients`.

    Args:
        local_layers: A layer or several, whose gradients stay on their rank; none by default.

    Returns:
        A tape that records like `gradtape` and shares its state.

    Raises:
        ValueError: An argument is wrong, or the tape is distributed already.
    """
    weights = weights_of(local_layers)
    tape = _distributed_tape(gradtape, OptimizerOptions.from_arguments(locals()))
    for weight in weights:
        tape.register_local_source(weight)
    return tape


def _distributed_tape(gradtape: tf.GradientTape, options: OptimizerOptions) -> Any:
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"gradtape must be a tf.GradientTape, not {type(gradtape).__name__}")
    if isinstance(gradtape, _Distributed):
        raise ValueError("this tape is a DistributedGradientTape already")
    tape_class: Any = type(gradtape)
    tape: Any = object.__new__(_distributed_class(tape_class))
    tape.__dict__ = gradtape.__dict__
    tape._plain = gradtape
    tape._reduction = GradientReduction(options.checked(), "DistributedGradientTape")
    return tape
