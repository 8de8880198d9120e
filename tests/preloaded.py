"""Imported last by the tests' fork server: makes what it has imported cheap for forked ranks.

A rank shares memory with the fork server until one of them writes to it. The collector writes into
every object that it looks at, and torch takes all of its operators down when a process ends: both
would copy most of that memory, which takes longer than all else that starting and ending a rank
costs.
"""

from __future__ import annotations

import gc
import weakref

gc.collect()
gc.freeze()
for _finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    _finalizer.atexit = False
