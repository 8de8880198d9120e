"""A worker that holds the interpreter's lock: it lives, but no thread of it runs any Python.

As an extension module does that computes or waits without releasing the lock.
"""

from __future__ import annotations

import ctypes


def hold_the_lock(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)
