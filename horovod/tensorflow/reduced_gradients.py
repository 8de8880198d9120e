"""Which gradients are those of all ranks already, so that no optimizer reduces them again.

Distributed tapes and the optimizers' `compute_gradients` note what they have reduced: on the
tensors, and on the variables, because a script may clip or scale gradients before it applies them.
The note on a variable holds for the graph (or the eager program) that it was made in, until one of
our optimizers applies a gradient to the variable.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.tensorflow.gradients import GradientReduction


class Done(enum.IntEnum):
    """What has been done to a gradient before it is applied."""

    NOTHING = 0
    REDUCED = 1
    ADDED_UP = 2  # over the passes of a step, and reduced: all that an optimizer does


class _Eager:
    """Where code runs that builds no graph."""


_EAGER = _Eager()
_NOTE = "_horovod_done"


def note(gradients: Sequence[Any], variables: Sequence[Any], done: Done) -> None:
    """What will be applied to `variables` next is made of these gradients."""
    place = weakref.ref(_here()[0])
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None:
            setattr(gradient, _NOTE, done)
            setattr(_noted(variable), _NOTE, (done, place))


def noted(gradient: Any) -> Done:
    """What has been done to this very tensor."""
    return getattr(gradient, _NOTE, Done.NOTHING)


def take_notes(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Done]:
    """What has been done to gradients that are applied now. Notes on variables are used up."""
    here = _here()
    answers = []
    for gradient, variable in zip(gradients, variables, strict=True):
        done = noted(gradient)
        on_variable, place = getattr(_noted(variable), _NOTE, (Done.NOTHING, lambda: None))
        if any(place() is each for each in here):
            delattr(_noted(variable), _NOTE)
            done = max(done, on_variable)
        answers.append(done)
    return answers


class OptimizerReduction(GradientReduction):
    """The reduction of an optimizer: it leaves alone what has been reduced before."""

    def take_notes(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Done]:
        """What has been done to gradients that are applied now."""
        return take_notes(gradients, variables)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients that are applied now."""
        return self.reduce_rest(gradients, variables, take_notes(gradients, variables))

    def reduce_rest(
        self, gradients: Sequence[Any], variables: Sequence[Any], done: Sequence[Done]
    ) -> list[Any]:
        """Reduce the gradients that nothing has been done to."""
        results = list(gradients)
        rest = [index for index, each in enumerate(done) if each is Done.NOTHING]
        reduced = super().__call__(
            [results[index] for index in rest], [variables[index] for index in rest]
        )
        for index, gradient in zip(rest, reduced, strict=True):
            results[index] = gradient
        return results


def _noted(variable: Any) -> Any:
    """What a note about a variable is kept on: the same for a Keras variable and what it wraps."""
    return getattr(variable, "handle", variable)


def _here() -> list[Any]:
    """The graph that is being built and those around it; eagerly, the program."""
    if tf.executing_eagerly():
        return [_EAGER]
    graphs = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs
