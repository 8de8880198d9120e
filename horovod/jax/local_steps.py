"""The transformation for local_steps=H: ranks step alone, and synchronise models every H steps.

Made by `horovod.jax.optimizer.DistributedOptimizer`. The state is a tree like any other of optax.
It has where the ranks were after the last synchronisation (the *anchor*), and the outer momentum.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from horovod.common.local_steps import AVERAGING, LocalSchedule, OuterSGD, check_alike
from horovod.common.logging import get_logger
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average
from horovod.engine.runtime import runtime
from horovod.jax.arrays import is_tracer
from horovod.jax.compression import Compressor
from horovod.jax.functions import allgather_object
from horovod.jax.movements import broadcast
from horovod.jax.reductions import allreduce


class LocalStepsState(NamedTuple):
    """The state of a `DistributedOptimizer` with local steps."""

    steps: Any  # the number of steps that have ended, those of the warm-up included
    since: Any  # the number of local steps since the last synchronisation
    anchor: Any  # the parameters after the last synchronisation, in float32 at least
    momentum: Any  # of the outer optimizer; None where it keeps none
    inner: Any  # the state of the wrapped optimizer


class LocalStepsOptimizer(optax.GradientTransformationExtraArgs):
    """A transformation of optax whose steps have an end: `end_step` is to be called after each."""

    schedule: LocalSchedule
    average: Callable[[Any], Any]
    share_anchor: Callable[[Any], Any]
    has_updated = False  # whether somebody has trained with it
    has_ended_steps = False  # whether `end_step` was ever called

    def end_step(self, params: Any, opt_state: LocalStepsState) -> tuple[Any, LocalStepsState]:
        """Count a step, and synchronise the ranks' parameters if it is due after this step.

        Call it on all ranks after each `optax.apply_updates`, inside or outside of `jax.jit`. As
        long as it is not called the warm-up does not end.

        Args:
            params: The parameters after the step.
            opt_state: The state that `update` returned.

        Returns:
            The parameters and the state for the next step.
        """
        self.has_ended_steps = True
        warmup, every = self.schedule.warmup_steps, self.schedule.steps
        steps = opt_state.steps + 1
        since = jnp.where(steps > warmup, opt_state.since + 1, 0)
        state = opt_state._replace(steps=steps, since=since)

        def begin(params: Any, state: LocalStepsState) -> tuple[Any, LocalStepsState]:
            """Let all ranks measure from the same point: where the warm-up, or training, began."""
            anchor = _wide(params) if warmup else state.anchor
            return params, state._replace(anchor=self.share_anchor(anchor))

        def synchronise(params: Any, state: LocalStepsState) -> tuple[Any, LocalStepsState]:
            return self._synchronise(params, state, self.schedule.outer_sgd)

        params, state = _when(steps == max(warmup, 1), begin, params, state)
        return _when(since == every, synchronise, params, state)

    def synchronize_parameters(
        self, params: Any, opt_state: LocalStepsState
    ) -> tuple[Any, LocalStepsState]:
        """Average the parameters of all ranks now, wherever these are in their local steps.

        For the end of training, and before the model is evaluated or saved for use: afterwards all
        ranks have the same parameters. The outer optimizer takes no step, for its momentum is that
        of whole rounds of local steps. The count of local steps begins anew. All ranks must call it
        together. During the warm-up it changes nothing: the ranks have the same parameters then.

        Args:
            params: This rank's parameters.
            opt_state: The state that `end_step` returned.

        Returns:
            The parameters and the state to go on with.
        """

        def synchronise(params: Any, state: LocalStepsState) -> tuple[Any, LocalStepsState]:
            return self._synchronise(params, state, AVERAGING)

        return _when(opt_state.since > 0, synchronise, params, opt_state)

    def _synchronise(
        self, params: Any, state: LocalStepsState, outer: OuterSGD
    ) -> tuple[Any, LocalStepsState]:
        moved = jax.tree.map(
            lambda old, new: old - jnp.asarray(new, old.dtype), state.anchor, params
        )
        inner = state.inner
        if self.schedule.average_state:
            moved, inner = self.average((moved, _averaged_part(inner)))
            inner = _with_averaged_part(state.inner, inner)
        else:
            moved = self.average(moved)
        anchors, treedef = jax.tree.flatten(state.anchor)
        keeps = bool(outer.momentum)
        momenta = jax.tree.leaves(state.momentum) if keeps else [None] * len(anchors)
        pairs = [
            outer.update(*leaf)
            for leaf in zip(anchors, jax.tree.leaves(moved), momenta, strict=True)
        ]
        anchor = treedef.unflatten([new for new, _ in pairs])
        momentum = treedef.unflatten([new for _, new in pairs]) if keeps else state.momentum
        params = jax.tree.map(lambda new, old: new.astype(jnp.result_type(old)), anchor, params)
        since = jnp.zeros_like(state.since)
        return params, LocalStepsState(state.steps, since, anchor, momentum, inner)


def make_optimizer(
    inner: Any,
    schedule: LocalSchedule,
    reduce: Callable[[Any], Any],
    name: str | None,
    compression: type[Compressor],
    process_set: ProcessSet,
) -> LocalStepsOptimizer:
    """Make the transformation. Collective, except in elastic jobs.

    Args:
        inner: The wrapped transformation, which accepts extra arguments.
        schedule: The arguments of local steps, checked.
        reduce: What averages gradients in the steps of the warm-up.
        name: Name of the exchanges; the ranks match them by the order of their calls if None.
        compression: How what is exchanged is compressed.
        process_set: The ranks that synchronise.

    Returns:
        The transformation.
    """
    takes_part = process_set is global_process_set or process_set.included() is not False
    if takes_part and runtime.is_initialized() and not runtime.is_elastic():
        everyone = allgather_object(schedule.settings(), "local_steps.agreement", process_set)
        check_alike(process_set.ranks or range(len(everyone)), everyone)
    label = "local_steps" if name is None else f"{name}.local_steps"
    warmup = schedule.warmup_steps

    def init(params: Any) -> LocalStepsState:
        anchor = _wide(params)
        momentum = jax.tree.map(jnp.zeros_like, anchor) if schedule.outer_sgd.momentum else None
        # Each an array of its own, so that a step may donate the state.
        steps, since = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        return LocalStepsState(steps, since, anchor, momentum, inner.init(params))

    def update(
        gradients: Any, state: LocalStepsState, params: Any = None, **extra: Any
    ) -> tuple[Any, LocalStepsState]:
        optimizer.has_updated = True
        if warmup:
            gradients, _ = _when(
                state.steps < warmup, lambda given, _: (reduce(given), _), gradients, state.steps
            )
        updates, new = inner.update(gradients, state.inner, params, **extra)
        return updates, state._replace(inner=new)

    def average(tree: Any) -> Any:
        if not takes_part:
            return tree
        return allreduce(
            tree, name=label, compression=compression, op=Average, process_set=process_set
        )

    def share_anchor(anchor: Any) -> Any:
        if not takes_part:
            return anchor
        root = process_set.ranks[0] if process_set.ranks else 0
        return broadcast(anchor, root, f"{label}.anchor", process_set)

    optimizer = LocalStepsOptimizer(init, update)
    optimizer.schedule = schedule
    optimizer.average = average
    optimizer.share_anchor = share_anchor
    atexit.register(_warn_if_never_synchronised, optimizer)
    return optimizer


def _warn_if_never_synchronised(optimizer: LocalStepsOptimizer) -> None:
    """Say at the end of the program that a call is missing: inside jit nobody can see it before."""
    if optimizer.has_updated and not optimizer.has_ended_steps:
        get_logger().warning(
            "DistributedOptimizer(local_steps=%s): end_step was never called, so the ranks never "
            "synchronised, and each has a model of its own. Call params, opt_state = "
            "optimizer.end_step(params, opt_state) after each step",
            optimizer.schedule.steps,
        )


def _wide(params: Any) -> Any:
    """Copy parameters to float32 at least: many small outer steps must add up."""
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32)), params
    )


def _when(
    condition: Any, change: Callable[[Any, Any], tuple[Any, Any]], first: Any, second: Any
) -> tuple[Any, Any]:
    """Return `change(first, second)` if the condition holds, else both as they are."""
    if is_tracer(condition):
        return jax.lax.cond(condition, change, lambda *both: both, first, second)
    return change(first, second) if condition else (first, second)


def _is_averaged(leaf: Any) -> bool:
    """Return whether a leaf of an optimizer's state is an array of averages, not a count."""
    return jnp.ndim(leaf) > 0 and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def _averaged_part(inner: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(inner) if _is_averaged(leaf)]


def _with_averaged_part(inner: Any, averages: list[Any]) -> Any:
    """Return the state with `averages` in the place of the leaves that were averaged."""
    remaining = iter(averages)
    return jax.tree.map(lambda leaf: next(remaining) if _is_averaged(leaf) else leaf, inner)
