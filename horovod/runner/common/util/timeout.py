"""The error for what did not happen in time, raised by services under `horovod.runner.common`."""

from __future__ import annotations


class TimeoutException(TimeoutError):
    """Something that was waited for did not happen in time."""
