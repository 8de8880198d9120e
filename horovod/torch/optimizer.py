"""DistributedOptimizer: wraps a torch optimizer so that it trains on all ranks' gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from horovod.common.local_steps import OuterSGD
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Average, ReduceOp
from horovod.engine.runtime import runtime
from horovod.torch.compression import Compression, Compressor
from horovod.torch.gradients.buckets import Named
from horovod.torch.hooks.base import CommunicationHook
from horovod.torch.optimizers.checks import check_options
from horovod.torch.optimizers.options import TorchOptions
from horovod.torch.optimizers.wrapping import new_optimizer

if TYPE_CHECKING:
    from horovod.torch.optimizers.reducing import ReducingOptimizer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[Named] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    shard_state: bool = False,
    communication_hook: CommunicationHook | None = None,
    overlap_forward: torch.nn.Module | None = None,
    local_steps: int | None = None,
    outer: OuterSGD | None = None,
    warmup_steps: int = 0,
    average_state: bool = False,
    average_buffers: torch.nn.Module | None = None,
    fragments: int = 1,
    delay: int = 0,
    alpha: float | None = None,
    within: ProcessSet | Literal["host"] | None = None,
) -> Any:
    """Wrap `optimizer` so that `step` first averages the gradients over all ranks.

    The result is an optimizer of the same class; what it adds is in `ReducingOptimizer`.

    Args:
        optimizer: Any torch optimizer, with the parameters to train.
        named_parameters: Usually ``model.named_parameters()``; names appear in errors and the
            timeline.
        compression: Compressor of gradients that travel, such as ``hvd.Compression.fp16``.
        backward_passes_per_step: Number of backward passes whose gradients are added up locally
            before they are reduced.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: Divide gradients by this factor before the sum and by
            ``size / factor`` after it: the result is still the average, and half precisions do not
            overflow in the sum. 1.0 divides after the sum alone.
        num_groups: Older form of `groups`.
        groups: Number of groups, or lists of parameters; the gradients of a group are reduced
            together.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones.
        process_set: The ranks to reduce with; others train on their own.
        shard_state: Whether each rank keeps the optimizer state (momenta, ...) of a part of the
            parameters only and updates that part for all; results are the same. Muon and Adafactor,
            which need whole matrices, get whole parameters. See `horovod.torch.optimizers.sharded`.
        communication_hook: Hook that sends other tensors in place of the gradients, such as
            ``hvd.hooks.PowerSGD()``.
        overlap_forward: The model; between hosts and on devices `step` then returns at once, and
            parameters are updated when they are next used, so that the next forward hides the
            travel of gradients that backward could not. Results are the same. See
            `horovod.torch.optimizers.delaying`.
        local_steps: Number of steps, for slow links, that each rank takes with its own gradients
            before all synchronise their models. The arguments below say how; docs/slow_links.md
            says when to use which.
        outer: Optimizer of the step that the ranks then take together, such as
            ``hvd.OuterSGD(lr=0.7, momentum=0.9)`` (DiLoCo). None averages parameters (local SGD).
        warmup_steps: Ordinary steps, with gradients averaged over all ranks, before the first
            local one.
        average_state: Average the state of `optimizer` (momenta, ...) in each synchronisation
            too; otherwise every rank keeps its own.
        average_buffers: The model, to average its floating-point buffers (running statistics of
            BatchNorm) in each synchronisation too; otherwise every rank keeps its own.
        fragments: The model is divided by layers into this many parts, which are synchronised in
            turn, each every `local_steps` steps.
        delay: Steps between sending a fragment and updating its parameters: it travels beside
            training, and a step waits only if it has not arrived by then. 0 waits at once.
        alpha: Weight of a rank's own parameters when a delayed fragment is updated: 0.5 by
            default with `delay`.
        within: The process set of this rank's cluster, or ``"host"`` for the ranks of its host: in
            it gradients are averaged in every step, and the models of all clusters every
            `local_steps` steps.

    Raises:
        ValueError: An argument is wrong, on this rank or another; or the ranks' models differ. All
            ranks raise.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> loss.backward(); optimizer.step()
    """
    return distribute(optimizer, TorchOptions.from_arguments(locals()))


def distribute(optimizer: torch.optim.Optimizer, options: TorchOptions) -> Any:
    """Wrap `optimizer` as `DistributedOptimizer` does with these options."""
    # Imported late: it loads torch's compiler, which making the optimizer has loaded anyway.
    from horovod.torch.optimizers.reducing import ReducingOptimizer

    problem = None
    if isinstance(optimizer, ReducingOptimizer):
        problem = ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    checked = check_options(optimizer, options, problem)
    wrapped = new_optimizer(type(optimizer), _mixin(options))
    # A scheduler made before wraps the old object's step(), which must not shadow ours.
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    wrapped._original = weakref.ref(optimizer)
    wrapped._configure(*checked)
    return wrapped


def _mixin(options: TorchOptions) -> type[ReducingOptimizer]:
    """Return the class that does what these options ask for."""
    if options.schedule.local_steps is not None:
        from horovod.torch.optimizers.local import LocalStepsOptimizer  # few need it

        return LocalStepsOptimizer
    if options.op == Adasum and runtime.topology.size > 1:
        from horovod.torch.optimizers.adasum import AdasumOptimizer  # few need it

        return AdasumOptimizer
    if options.shard_state:
        from horovod.torch.optimizers.sharded import ShardedOptimizer

        return ShardedOptimizer
    if options.overlap_forward is not None:
        from horovod.torch.optimizers.delaying import DelayingOptimizer

        return DelayingOptimizer
    from horovod.torch.optimizers.reducing import ReducingOptimizer

    return ReducingOptimizer
