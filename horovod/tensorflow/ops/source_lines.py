"""Finds the line of the user's script that asked for an operation, for messages about it."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import tensorflow as tf

SourceLine = tuple[str, int]  # file, line

_LIBRARIES = {"horovod", "tensorflow", "keras", "tf_keras"}


def line_of_script() -> SourceLine:
    """Return the innermost line on the stack that does not belong to a library."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals.get("__name__")) in _LIBRARIES:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def line_of_op(op: tf.Operation) -> SourceLine | None:
    """Return the line for a graph op, in the script as it was before AutoGraph rewrote it."""
    modules = [sys.modules.get(name) for name in _LIBRARIES]
    files = [module.__file__ for module in modules if module is not None and module.__file__]
    folders = tuple(os.path.join(os.path.dirname(file), "") for file in files)
    for entry in reversed(op.traceback or []):
        if not entry.filename.startswith(folders):
            return entry.filename, entry.lineno
    return None


def _package(module: Any) -> str:
    return str(module).partition(".")[0]
