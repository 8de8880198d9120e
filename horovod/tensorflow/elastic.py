"""Elastic training with TensorFlow: ``hvd.elastic.run`` and the states to use with it.

`TensorFlowKerasState` is for a Keras model and its optimizer, `TensorFlowState` for any variables.
A tf.function that was traced before the ranks changed continues to work afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from horovod._keras.elastic import KerasStateBase, VariablesState, run
from horovod._keras.variables import to_numpy, to_torch
from horovod.tensorflow.ops.bridge import read_variables, write_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowKerasState(KerasStateBase):
    """The state of a Keras model, its optimizer, and attributes.

    Args:
        model: A Keras model that is built.
        optimizer: The optimizer; the model's own by default. If it is not built yet, it is built
            for the model's trainable variables, so that it can receive its state.
        backend: The module whose `get_session` returns the session of a v1 graph;
            tf.compat.v1.keras.backend by default.
        **kwargs: Attributes with their initial values, such as ``epoch=0``.

    Raises:
        ValueError: The model is not built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        self._session_source = backend
        super().__init__(model, optimizer, **kwargs)

    def _read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        if tf.executing_eagerly():
            return super()._read(variables)
        return _read_in_session(variables, self._session())

    def _write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        if tf.executing_eagerly():
            super()._write(variables, values)
        else:
            _write_in_session(variables, values, self._session())

    def _session(self) -> Any:
        source = self._session_source
        if not hasattr(source, "get_session"):  # for example None, or tf.keras.backend
            source = tf.compat.v1.keras.backend
        return source.get_session()


class TensorFlowState(VariablesState):
    """The state of variables and attributes: ``TensorFlowState(model.variables, epoch=0)``.

    Args:
        variables: The variables to carry over; in a v1 graph all global variables by default.
        session: The session of a v1 graph; the default session by default.
        **kwargs: Attributes with their initial values, such as ``epoch=0``.

    Raises:
        ValueError: There are no variables to carry over, or no session that has them.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None:
            if tf.executing_eagerly():
                raise ValueError(
                    "pass the variables to look after, such as model.variables: TensorFlow has no "
                    "list of all variables in eager execution"
                )
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        self.session = session
        super().__init__(**kwargs)

    def _shared_variables(self) -> list[Any]:
        return self.variables

    def _read(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        if tf.executing_eagerly():
            return read_variables(variables)
        return _read_in_session(variables, self._current_session())

    def _write(self, variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        if tf.executing_eagerly():
            write_variables(variables, values)
        else:
            _write_in_session(variables, values, self._current_session())

    def _current_session(self) -> Any:
        session = self.session or tf.compat.v1.get_default_session()
        if session is None:
            raise ValueError("the variables belong to a v1 graph: pass the session that has them")
        return session


def _read_in_session(variables: Sequence[Any], session: Any) -> list[torch.Tensor]:
    return [to_torch(np.asarray(value)) for value in session.run(list(variables))]


def _write_in_session(
    variables: Sequence[Any], values: Sequence[torch.Tensor], session: Any
) -> None:
    # Assign through the initializers, because no op may be added to a graph that is in use.
    initializers = [variable.initializer for variable in variables]
    feeds = {
        initializer.inputs[1]: to_numpy(
            value, np.empty(0, initializer.inputs[1].dtype.as_numpy_dtype)
        )
        for initializer, value in zip(initializers, values, strict=True)
    }
    session.run(initializers, feeds)
