"""Turns the engine's errors into TensorFlow's.

    tf.errors.FailedPreconditionError  Horovod is not initialised, or the ranks do not agree
    tf.errors.InvalidArgumentError     this rank passed a wrong argument
    tf.errors.AbortedError             Horovod was shut down, or a rank was lost

In eager calls, the raised classes derive from TensorFlow's class and also from Horovod's own
(HorovodInternalError, or ValueError for a wrong argument), so that a script or the elastic loop can
catch either. Graphs raise TensorFlow's plain classes, with UnknownError instead of AbortedError,
which TensorFlow does not let Python functions raise there. Their text contains Horovod's class name
and message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.runtime import runtime


class _WithMessage:
    """Adds a constructor that takes only a message.

    `__init__` stays TensorFlow's, because AutoGraph makes errors again to show the user's own code.
    """

    @classmethod
    def with_message(cls, message: str) -> Any:
        return cls(None, None, message)  # type: ignore[call-arg]


class FailedPreconditionError(
    _WithMessage, tf.errors.FailedPreconditionError, HorovodInternalError
):
    """Horovod is not initialised, or the ranks passed different arguments."""


class AbortedError(_WithMessage, tf.errors.AbortedError, HorovodInternalError):
    """Horovod was shut down, or a rank was lost."""


class InvalidArgumentError(_WithMessage, tf.errors.InvalidArgumentError, ValueError):
    """This rank passed a wrong argument."""


def eager_error(error: Exception, was_initialised: bool) -> tf.errors.OpError:
    """Return the TensorFlow error for an error that the engine raised in an eager call.

    `was_initialised` says whether Horovod was initialised before the call.
    """
    if isinstance(error, tf.errors.OpError):
        return error
    if isinstance(error, HorovodInternalError):
        if not was_initialised or _others_still_work():
            return FailedPreconditionError.with_message(_text(error))
        return AbortedError.with_message(_text(error))
    return InvalidArgumentError.with_message(_text(error))


@contextlib.contextmanager
def tensorflow_errors() -> Iterator[None]:
    """Raise the engine's errors inside this context as TensorFlow's."""
    was_initialised = runtime.is_initialized()
    try:
        yield
    except (ValueError, HorovodInternalError) as error:
        raise eager_error(error, was_initialised) from error


def graph_error(error: Exception, was_initialised: bool) -> Exception:
    """Return the error to raise inside a graph op, for TensorFlow to convert (see `python_op`)."""
    if not isinstance(error, HorovodInternalError):
        return ValueError(_text(error)) if isinstance(error, ValueError) else error
    if isinstance(eager_error(error, was_initialised), FailedPreconditionError):
        return FailedPreconditionError.with_message(f"HorovodInternalError: {_text(error)}")
    return HorovodInternalError(_text(error))


def _text(error: Exception) -> str:
    """Return the error's message, with TensorFlow's names of types."""
    message = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return re.sub(r"\btorch\.(?=bool|u?int|b?float|complex)", "tf.", message)


def _others_still_work() -> bool:
    """Return whether only one collective failed, so that others on all process sets still work."""
    try:
        rank = runtime.topology.rank
        sets = runtime.process_set_ids_and_ranks().items()
        return all(runtime.failure(number) is None for number, r in sets if rank in r)
    except (ValueError, HorovodInternalError):
        return False  # Horovod has been shut down meanwhile
