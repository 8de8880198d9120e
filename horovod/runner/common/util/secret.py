"""Keys for services under `horovod.runner.common`, which serve only those who know theirs."""

from __future__ import annotations

from horovod.common.wire import new_key


def make_secret_key() -> bytes:
    """A fresh random key. It must travel by environment, pipe or private file, never by argv."""
    return new_key()
