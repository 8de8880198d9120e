"""The transformation for local_steps=H: ranks step alone, and synchronise models every H steps.

`horovod.jax.optimizer.DistributedOptimizer` makes it. Like any state of optax, its state is a tree:
it holds the parameters after the last synchronisation (the *anchor*), the outer momentum, and what
this rank has sent and not applied yet. Fragments take turns by the schedule that
`horovod.common.local_steps` defines.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from horovod.common.local_steps import (
    AVERAGING,
    HOST,
    LocalSchedule,
    OuterSGD,
    check_alike,
    divide,
)
from horovod.common.logging import get_logger
from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.process_sets import global_process_set
from horovod.engine.runtime import runtime
from horovod.jax.arrays import is_tracer
from horovod.jax.call import Phase
from horovod.jax.functions import allgather_object
from horovod.jax.movements import broadcast
from horovod.jax.reductions import average_in_phase, reduce_gradients
from horovod.torch.optimizers.local_steps import set_of_this_host


class LocalStepsState(NamedTuple):
    """The state of a `DistributedOptimizer` with local steps."""

    steps: Any  # the number of steps that have ended, those of the warm-up included
    since: Any  # the number of local steps since they began or the parameters were averaged
    anchor: Any  # the parameters after the last synchronisation, in float32 at least
    momentum: Any  # the outer optimizer's; None if it keeps none
    inner: Any  # the state of the wrapped optimizer
    sent: Any = None  # the last result of `Fragment.outgoing`, if there is a `delay`


class Fragment(NamedTuple):
    """Layers that are synchronised together, by the indices of their leaves."""

    number: int
    first_turn: int  # the local step after which it is sent first
    params: list[int]  # indices among the leaves of the parameters
    entries: list[int]  # indices among the leaves of the wrapped optimizer's state

    def outgoing(self, params: Any, state: LocalStepsState) -> tuple[list[Any], list[Any]]:
        """Return how far this rank has moved, with the sign changed, and its optimizer's state."""
        anchors, values = jax.tree.leaves(state.anchor), jax.tree.leaves(params)
        moved = [anchors[i] - jnp.asarray(values[i], anchors[i].dtype) for i in self.params]
        entries = jax.tree.leaves(state.inner)
        return moved, [jnp.array(entries[i]) for i in self.entries]

    def apply(
        self,
        averages: tuple[list[Any], list[Any]],
        params: Any,
        state: LocalStepsState,
        outer: OuterSGD,
        local_share: float,
    ) -> tuple[Any, LocalStepsState]:
        """Take the outer step with what the ranks have exchanged."""
        gradients, entries = averages
        anchors, values = jax.tree.leaves(state.anchor), jax.tree.leaves(params)
        momenta = jax.tree.leaves(state.momentum) if outer.momentum else [None] * len(anchors)
        news = [
            outer.update(anchors[i], gradient, momenta[i])
            for i, gradient in zip(self.params, gradients, strict=True)
        ]
        shared = [anchor for anchor, _ in news]
        state = state._replace(anchor=_with_leaves(state.anchor, self.params, shared))
        if outer.momentum:
            changed = [momentum for _, momentum in news]
            state = state._replace(momentum=_with_leaves(state.momentum, self.params, changed))
        mixed = [
            _mix(values[i], new, local_share) for i, new in zip(self.params, shared, strict=True)
        ]
        own = jax.tree.leaves(state.inner)
        mixed_entries = [
            _mix(own[i], new, local_share) for i, new in zip(self.entries, entries, strict=True)
        ]
        state = state._replace(inner=_with_leaves(state.inner, self.entries, mixed_entries))
        return _with_leaves(params, self.params, mixed), state


class LocalStepsOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation with local steps: users call `end_step` after each step."""

    schedule: LocalSchedule
    average: Callable[[Fragment, Any, Any, Phase], Any]
    share_anchor: Callable[[Any], Any]
    has_updated = False  # whether `update` was ever called
    has_ended_steps = False  # whether `end_step` was ever called

    def end_step(self, params: Any, opt_state: LocalStepsState) -> tuple[Any, LocalStepsState]:
        """Count a step, and synchronise the ranks' parameters if it is due after this step.

        Call it on all ranks after each `optax.apply_updates`, inside or outside of `jax.jit`. The
        warm-up does not end without it.

        Args:
            params: The parameters after the step.
            opt_state: The state that `update` returned.

        Returns:
            The parameters and the state for the next step.
        """
        self.has_ended_steps = True
        warmup, delay = self.schedule.warmup_steps, self.schedule.delay
        steps = opt_state.steps + 1
        since = jnp.where(steps > warmup, opt_state.since + 1, 0)
        state = opt_state._replace(steps=steps, since=since)

        def begin(params: Any, state: LocalStepsState) -> tuple[Any, LocalStepsState]:
            """Give all ranks the same anchor: the parameters when local steps begin."""
            anchor = _wide(params) if warmup else state.anchor
            return params, state._replace(anchor=self.share_anchor(anchor))

        params, state = _when(steps == max(warmup, 1), begin, params, state)
        for fragment in divide_model(self.schedule, params, state.inner):
            turn = self._steps_since_turn(fragment, since)
            if not delay:
                synchronise = partial(self._synchronise, fragment, self.schedule.outer_sgd)
                params, state = _when(turn == 0, synchronise, params, state)
                continue
            params, state = _when(turn == delay, partial(self._finish, fragment), params, state)
            params, state = _when(turn == 0, partial(self._start, fragment), params, state)
        return params, state

    def synchronize_parameters(
        self, params: Any, opt_state: LocalStepsState
    ) -> tuple[Any, LocalStepsState]:
        """Average the parameters of all ranks now, at any point of their local steps.

        Call it at the end of training, and before the model is evaluated or saved for use:
        afterwards all ranks have the same parameters. The outer optimizer takes no step, as its
        momentum belongs to whole rounds of local steps. The count of local steps begins anew. All
        ranks must call it together. During the warm-up it changes nothing, as ranks do not differ.

        Args:
            params: This rank's parameters.
            opt_state: The state that `end_step` returned.

        Returns:
            The parameters and the state to go on with.
        """

        def synchronise(params: Any, state: LocalStepsState) -> tuple[Any, LocalStepsState]:
            fragments = divide_model(self.schedule, params, state.inner)
            if self.schedule.delay:
                for fragment in fragments:
                    turn = self._steps_since_turn(fragment, state.since)
                    is_sent = (turn >= 0) & (turn < self.schedule.delay)
                    params, state = _when(is_sent, partial(self._finish, fragment), params, state)
            for fragment in fragments:
                params, state = self._synchronise(fragment, AVERAGING, params, state)
            return params, state._replace(since=jnp.zeros_like(state.since))

        return _when(opt_state.since > 0, synchronise, params, opt_state)

    def _steps_since_turn(self, fragment: Fragment, since: Any) -> Any:
        """Return how many steps ago the fragment was last due to be sent; -1 if it never was."""
        steps = since - fragment.first_turn
        return jnp.where(steps < 0, -1, steps % self.schedule.steps)

    def _synchronise(
        self, fragment: Fragment, outer: OuterSGD, params: Any, state: LocalStepsState
    ) -> tuple[Any, LocalStepsState]:
        """Exchange how far the ranks have moved, and take the outer step."""
        averages = self.average(fragment, fragment.outgoing(params, state), state.steps, "whole")
        return fragment.apply(averages, params, state, outer, local_share=0.0)

    def _start(
        self, fragment: Fragment, params: Any, state: LocalStepsState
    ) -> tuple[Any, LocalStepsState]:
        """Send how far this rank has moved."""
        outgoing = fragment.outgoing(params, state)
        self.average(fragment, outgoing, state.steps, "start")
        moved, entries = state.sent
        sent = (
            _with_leaves(moved, fragment.params, outgoing[0]),
            _with_leaves(entries, fragment.entries, outgoing[1]),
        )
        return params, state._replace(sent=sent)

    def _finish(
        self, fragment: Fragment, params: Any, state: LocalStepsState
    ) -> tuple[Any, LocalStepsState]:
        """Wait for what was sent, and take the outer step with it."""
        moved, entries = (jax.tree.leaves(part) for part in state.sent)
        outgoing = [moved[i] for i in fragment.params], [entries[i] for i in fragment.entries]
        started_at = state.steps - self._steps_since_turn(fragment, state.since)
        averages = self.average(fragment, outgoing, started_at, "finish")
        schedule = self.schedule
        return fragment.apply(averages, params, state, schedule.outer_sgd, schedule.local_share)


_num_optimizers = 0  # the number of optimizers on whose settings the ranks have agreed
_owners = itertools.count()  # numbers of this process's optimizers, which tell exchanges apart


def make_optimizer(inner: Any, options: OptimizerOptions) -> LocalStepsOptimizer:
    """Make the transformation. Collective, except in elastic jobs.

    Args:
        inner: The wrapped transformation, which accepts extra arguments.
        options: The arguments of `DistributedOptimizer`, checked.

    Returns:
        The transformation.
    """
    global _num_optimizers
    schedule, process_set = options.schedule, options.process_set
    takes_part = process_set is global_process_set or process_set.included() is not False
    if takes_part and runtime.is_initialized() and not runtime.is_elastic():
        mine = _num_optimizers, schedule.settings()
        everyone = allgather_object(mine, "local_steps.agreement", process_set)
        ranks = process_set.ranks or range(len(everyone))
        check_alike(ranks, [settings for _, settings in everyone])
        _num_optimizers = max(number for number, _ in everyone) + 1
    reduce = partial(reduce_gradients, options=options)  # for the steps of the warm-up
    reduce_near: Callable[[Any], Any] = _same
    if schedule.within is not None:
        cluster = set_of_this_host() if schedule.within == HOST else schedule.within
        reduce_near = partial(reduce_gradients, options=replace(options, process_set=cluster))
    # Each optimizer has a name of its own, since delayed fragments travel beside everything else.
    # Elastic jobs cannot agree on a number here: a rank that joins later has made fewer optimizers.
    suffix = "" if runtime.is_initialized() and runtime.is_elastic() else f".{_num_optimizers}"
    label = f"local_steps{suffix}" if options.name is None else f"{options.name}.local_steps"
    owner = next(_owners)
    warmup = schedule.warmup_steps

    def init(params: Any) -> LocalStepsState:
        anchor = _wide(params)
        momentum = jax.tree.map(jnp.zeros_like, anchor) if schedule.outer_sgd.momentum else None
        # These are separate arrays, so that a step may donate the state.
        steps, since = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        entries = inner.init(params)
        divide_model(schedule, params, entries)  # refuses more fragments than layers
        sent = None
        if schedule.delay:
            averaged = [leaf if _is_averaged(leaf) else 0.0 for leaf in jax.tree.leaves(entries)]
            averaged = averaged if schedule.average_state else []
            sent = jax.tree.map(jnp.zeros_like, (anchor, averaged))
        return LocalStepsState(steps, since, anchor, momentum, entries, sent)

    def update(
        gradients: Any, state: LocalStepsState, params: Any = None, **extra: Any
    ) -> tuple[Any, LocalStepsState]:
        optimizer.has_updated = True
        is_warming = state.steps < warmup if warmup else False
        gradients = _choose(is_warming, reduce, reduce_near, gradients)
        updates, new = inner.update(gradients, state.inner, params, **extra)
        return updates, state._replace(inner=new)

    def average(fragment: Fragment, outgoing: Any, number: Any, phase: Phase) -> Any:
        if not takes_part:
            return outgoing
        arrays, structure = jax.tree.flatten(outgoing)
        exchange = f"{label}.{fragment.number}"
        numbers = jnp.array([owner, number], jnp.int32)
        averages = average_in_phase(
            arrays, numbers, exchange, options.compression, process_set, phase
        )
        return jax.tree.unflatten(structure, averages)

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
    """Warn at the end of the program if `end_step` was never called; jit hides that before."""
    if optimizer.has_updated and not optimizer.has_ended_steps:
        get_logger().warning(
            "DistributedOptimizer(local_steps=%s): end_step was never called, so the ranks never "
            "synchronised, and each has a model of its own. Call params, opt_state = "
            "optimizer.end_step(params, opt_state) after each step",
            optimizer.schedule.steps,
        )


def _wide(params: Any) -> Any:
    """Copy parameters to float32 or wider, so that many small outer steps add up."""
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32)), params
    )


def _when(
    condition: Any, change: Callable[[Any, Any], tuple[Any, Any]], first: Any, second: Any
) -> tuple[Any, Any]:
    """Return `change(first, second)` if the condition holds, else both unchanged."""
    return _choose(condition, change, lambda *both: both, first, second)


def _choose(condition: Any, one: Callable[..., Any], other: Callable[..., Any], *given: Any) -> Any:
    """Return `one(*given)` if the condition holds, else `other(*given)`."""
    if is_tracer(condition):
        return jax.lax.cond(condition, one, other, *given)
    return one(*given) if condition else other(*given)


def _same(tree: Any) -> Any:
    return tree


def divide_model(schedule: LocalSchedule, params: Any, inner: Any) -> list[Fragment]:
    """Divide a tree of parameters by layers; an inner dict, list or module is a layer.

    Args:
        schedule: The arguments of local steps.
        params: The parameters.
        inner: The state of the wrapped optimizer. What it has of a parameter, at a path that ends
            like the parameter's, belongs to the fragment of the parameter.

    Returns:
        The fragments, in the order of their turns.

    Raises:
        ValueError: There are more fragments than layers.
    """
    paths = [path for path, _ in _paths_and_leaves(params)]
    sizes = [jnp.size(leaf) for leaf in jax.tree.leaves(params)]
    parts = divide([".".join(path) for path in paths], sizes, schedule.fragments)
    owners = {paths[index]: number for number, part in enumerate(parts) for index in part}
    entries: list[list[int]] = [[] for _ in parts]
    if schedule.average_state:
        for index, (path, leaf) in enumerate(_paths_and_leaves(inner)):
            if _is_averaged(leaf):
                endings = (path[start:] for start in range(len(path) + 1))
                number = next((owners[each] for each in endings if each in owners), 0)
                entries[number].append(index)
    return [
        Fragment(number, schedule.first_turn(number), part, entries[number])
        for number, part in enumerate(parts)
    ]


def _paths_and_leaves(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf)
        for path, leaf in found
    ]


def _with_leaves(tree: Any, indices: list[int], news: list[Any]) -> Any:
    """Return a tree with other leaves at these indices."""
    leaves, structure = jax.tree.flatten(tree)
    for index, new in zip(indices, news, strict=True):
        leaves[index] = new
    return jax.tree.unflatten(structure, leaves)


def _mix(own: Any, shared: Any, local_share: float) -> Any:
    """Mix `local_share` of `own` into `shared`, and return the result in the type of `own`."""
    dtype = jnp.result_type(own)
    if local_share:
        shared = shared + local_share * (jnp.asarray(own, shared.dtype) - shared)
    return shared.astype(dtype)


def _is_averaged(leaf: Any) -> bool:
    """Return whether a leaf of an optimizer's state is an array of averages, not a count."""
    return jnp.ndim(leaf) > 0 and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))
