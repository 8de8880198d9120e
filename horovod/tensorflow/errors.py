"""TensorFlow's error classes for what the engine raises.

    tf.errors.FailedPreconditionError  not initialised, or the ranks do not agree
    tf.errors.InvalidArgumentError     a wrong argument on this rank
    tf.errors.AbortedError             shut down, or a rank was lost

The classes raised here are Horovod's own at the same time (HorovodInternalError, or ValueError for
a wrong argument), so that elastic training and scripts that catch either find them. That holds for
eager calls. Out of a graph come TensorFlow's own classes, with UnknownError in place of
AbortedError, which TensorFlow lets nobody raise there. Their text has Horovod's class name and
message.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.runtime import runtime


class _Raised:
    """How our code makes these errors.

    Their constructors stay TensorFlow's: AutoGraph rebuilds errors to show the user's own code.
    """

    @classmethod
    def because(cls, message: str) -> Any:
        return cls(None, None, message)  # type: ignore[call-arg]


class FailedPreconditionError(_Raised, tf.errors.FailedPreconditionError, HorovodInternalError):
    """Horovod is not initialised, or the ranks asked for different things."""


class AbortedError(_Raised, tf.errors.AbortedError, HorovodInternalError):
    """Horovod was shut down, or a rank was lost."""


class InvalidArgumentError(_Raised, tf.errors.InvalidArgumentError, ValueError):
    """This rank passed something wrong."""


def eager_error(error: Exception, was_initialised: bool) -> tf.errors.OpError:
    """The TensorFlow error that says what a failed call of the engine said.

    `was_initialised`: whether Horovod was, before the call.
    """
    if isinstance(error, tf.errors.OpError):
        return error
    if isinstance(error, HorovodInternalError):
        if not was_initialised or _others_still_work():
            return FailedPreconditionError.because(_text(error))
        return AbortedError.because(_text(error))
    return InvalidArgumentError.because(_text(error))


def graph_error(error: Exception, was_initialised: bool) -> Exception:
    """The error to raise inside of a graph op, of which TensorFlow makes its own (`python_op`)."""
    if not isinstance(error, HorovodInternalError):
        return ValueError(_text(error)) if isinstance(error, ValueError) else error
    if isinstance(eager_error(error, was_initialised), FailedPreconditionError):
        return FailedPreconditionError.because(f"HorovodInternalError: {_text(error)}")
    return HorovodInternalError(_text(error))


def _text(error: Exception) -> str:
    """What the error says, with types named as in TensorFlow."""
    message = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return re.sub(r"\btorch\.(?=bool|u?int|b?float|complex)", "tf.", message)


def _others_still_work() -> bool:
    """Whether a collective failed by itself, rather than all of them for good."""
    try:
        rank = runtime.topology.rank
        sets = runtime.process_set_ids_and_ranks().items()
        return all(runtime.failure(number) is None for number, r in sets if rank in r)
    except (ValueError, HorovodInternalError):
        return False  # it has been shut down meanwhile
