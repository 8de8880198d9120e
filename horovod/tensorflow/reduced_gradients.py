"""Marks gradients that are reduced already, so that no optimizer reduces them again.

Distributed tapes and the optimizers' `compute_gradients` put marks on the tensors that they have
reduced. They put marks on the variables, too, because a script may clip or scale gradients, which
makes new tensors, before it applies them. The mark on a variable is valid in the graph (or the
eager program) in which it was made, until one of our optimizers applies a gradient to the variable.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.tensorflow.gradients import GradientReduction


class Done(enum.IntEnum):
    """The mark on a gradient: what has been done to it before it is applied."""

    NOTHING = 0
    REDUCED = 1
    ADDED_UP = 2  # added up over the passes of a step, and reduced


class _EagerProgram:
    """Stands for a graph where code runs eagerly."""


_EAGER_PROGRAM = _EagerProgram()
_MARK = "_horovod_done"


def mark(gradients: Sequence[Any], variables: Sequence[Any], done: Done) -> None:
    """Mark the gradients, and the variables to which they will be applied."""
    graph = weakref.ref(_current_graphs()[0])
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None:
            setattr(gradient, _MARK, done)
            setattr(_mark_owner(variable), _MARK, (done, graph))


def mark_of(gradient: Any) -> Done:
    """Return the mark on this tensor."""
    return getattr(gradient, _MARK, Done.NOTHING)


def take_marks(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Done]:
    """Return the marks of gradients that are applied now, and remove the variables' marks."""
    graphs = _current_graphs()
    marks = []
    for gradient, variable in zip(gradients, variables, strict=True):
        done = mark_of(gradient)
        on_variable, graph = getattr(_mark_owner(variable), _MARK, (Done.NOTHING, lambda: None))
        if any(graph() is each for each in graphs):
            delattr(_mark_owner(variable), _MARK)
            done = max(done, on_variable)
        marks.append(done)
    return marks


class OptimizerReduction(GradientReduction):
    """The reduction of an optimizer, which skips gradients that are reduced already."""

    def take_marks(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Done]:
        """Return the marks of gradients that are applied now, and remove the variables' marks."""
        return take_marks(gradients, variables)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce the gradients that are applied now, except those marked as reduced."""
        return self.reduce_unmarked(gradients, variables, take_marks(gradients, variables))

    def reduce_unmarked(
        self, gradients: Sequence[Any], variables: Sequence[Any], marks: Sequence[Done]
    ) -> list[Any]:
        """Reduce the gradients whose mark is `NOTHING`."""
        results = list(gradients)
        rest = [index for index, done in enumerate(marks) if done is Done.NOTHING]
        reduced = super().__call__(
            [results[index] for index in rest], [variables[index] for index in rest]
        )
        for index, gradient in zip(rest, reduced, strict=True):
            results[index] = gradient
        return results


def _mark_owner(variable: Any) -> Any:
    """Return the object that carries a variable's mark; a Keras variable shares the inner one's."""
    return getattr(variable, "handle", variable)


def _current_graphs() -> list[Any]:
    """Return the graph that is being built and those around it, or a stand-in in eager code."""
    if tf.executing_eagerly():
        return [_EAGER_PROGRAM]
    graphs = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs
