"""`DistributedGradientTape`: a tape whose gradients are those of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.tensorflow.bridge import unconverted
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradients import GradientReduction
from horovod.tensorflow.reduced_gradients import Done, note

_Pairs = list[tuple[Any, Any]]


class _Distributed:
    """What is added to the class of a tape.

    The tape that was wrapped does the work. The two share one state (their `__dict__`), so it does
    not matter which of them records, or when the tape is wrapped; what is ours is in slots.
    """

    __slots__ = ("_plain", "_reduction")

    _plain: tf.GradientTape
    _reduction: GradientReduction

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Like `tf.GradientTape.gradient`, reduced over all ranks.

        Ranks match gradients by the order of `sources`, so `use_generic_names`, which upstream
        has for models whose names differ between ranks, changes nothing.
        """
        gradients = self._plain.gradient(target, sources, output_gradients, unconnected_gradients)
        variables = tf.nest.flatten(sources)
        reduced = self._reduction(tf.nest.flatten(gradients), variables)
        note(reduced, variables, Done.REDUCED)
        return tf.nest.pack_sequence_as(sources, reduced)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """That of `tf.GradientTape`: not reduced."""
        return self._plain.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """That of `tf.GradientTape`: not reduced."""
        return self._plain.batch_jacobian(*args, **kwargs)

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of this source."""
        self._reduction.register_local(source)

    @unconverted
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[_Pairs, _Pairs]:
        """(source, gradient) of local sources, which are not reduced, and of all others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs: tuple[_Pairs, _Pairs] = [], []
        for pair in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True):
            pairs[0 if self._reduction.is_local(pair[0]) else 1].append(pair)
        return pairs


@functools.cache
def _distributed(tape_class: Any) -> Any:
    return type(tape_class.__name__, (_Distributed, tape_class), {})


@unconverted
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
    """A tape like `gradtape`, whose `gradient` gives the gradients of all ranks.

    Args:
        gradtape: A tf.GradientTape.
        device_dense: Accepted for compatibility.
        device_sparse: Accepted for compatibility.
        compression: What travels in place of gradients, such as `Compression.fp16`.
        sparse_as_dense: Reduce the gradients of embeddings as dense tensors.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: f divides by f before and by size / f after the sum.
        num_groups: Older form of `groups`.
        groups: A number of groups, or lists of variables, that are reduced together.
        process_set: The ranks to reduce with; others keep their own gradients.
        scale_local_gradients: Divide gradients that stay local by the number of ranks.

    Raises:
        ValueError: A wrong argument, or a tape that is distributed already.

    Examples:
        >>> with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        ...     loss = loss_of(model(images), labels)
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"gradtape must be a tf.GradientTape, not {type(gradtape).__name__}")
    if isinstance(gradtape, _Distributed):
        raise ValueError("this tape is a DistributedGradientTape already")
    tape_class: Any = type(gradtape)
    tape: Any = object.__new__(_distributed(tape_class))
    tape.__dict__ = gradtape.__dict__
    tape._plain = gradtape
    tape._reduction = GradientReduction(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        name="DistributedGradientTape",
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    return tape


@unconverted
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
    """A `DistributedGradientTape` that leaves `local_layers`, a layer or several, to each rank.

    `gradtape`, `device_dense`, `device_sparse`, `compression`, `sparse_as_dense`, `op`,
    `gradient_predivide_factor`, `num_groups`, `groups`, `process_set` and `scale_local_gradients`
    are those of `DistributedGradientTape`.
    """
    if local_layers is None:
        local_layers = []
    elif not isinstance(local_layers, (list, tuple, set)):
        local_layers = [local_layers]
    for layer in local_layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers must be Keras layers, not {type(layer).__name__}")
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in local_layers:
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape
