"""A worker's note to the launcher: "I failed because of other ranks".

When a rank is lost, the others fail within milliseconds, and often end before it. So the order in
which processes end says nothing about the cause. The engine leaves a note in the launcher's store
as soon as an operation fails because of others, and takes it back when it has started again; the
launcher (`horovod.runner`) then looks for a failed rank without such a note. Other launchers
(mpirun, srun, torchrun) know nothing of notes and blame the process that ends first. Under these a
rank that failed because of others waits a little before it ends: see `let_others_end`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable

from horovod.common.environments import RendezvousMethod, detect
from horovod.common.generations.membership import WORKER_ID, is_elastic
from horovod.common.joining.launcher_store import SECRET_KEY, STORE_ADDRESS, launchers_store
from horovod.common.store import Store

_PATIENCE = 2.0
"""Seconds that the launcher's store may take. It may be out of reach as part of the failure."""

_HEAD_START = 5.0
"""Seconds that a rank which caused a failure has to end before those that failed because of it."""


_has_left_note = False
_has_failed = False  # whether an operation failed because of others


def note_key(worker: str) -> str:
    """Return the key of a worker's note. `worker` is its rank, or its id in an elastic job."""
    return f"loss/{worker}"


def read_note(store: Store, worker: str) -> tuple[int, ...] | None:
    """Return the ranks that a worker blames for its failure; None without a note."""
    content = store.try_get(note_key(worker))
    return None if content is None else tuple(json.loads(content))


def leave_note(ranks: Iterable[int]) -> None:
    """Tell the launcher that operations here failed because of these ranks. Any thread may call."""
    global _has_left_note, _has_failed
    _has_failed = True
    if not _has_left_note and _launcher_serves_a_store():
        _has_left_note = True
        content = json.dumps(sorted(ranks)).encode()
        _ask(lambda store, key: store.set(key, content))


def take_note_back() -> None:
    """Remove the note, because the engine has started again: later failures have other reasons."""
    global _has_left_note, _has_failed
    _has_failed = False
    if _has_left_note:
        _has_left_note = False
        _ask(lambda store, key: store.delete(key))


def let_others_end() -> None:
    """Wait at the end of the process, if the launcher blames the process that ends first."""
    if not _has_failed or _launcher_serves_a_store():
        return
    with contextlib.suppress(ValueError):
        if detect().rendezvous is not RendezvousMethod.NOT_NEEDED:
            time.sleep(_HEAD_START)  # the launcher ends us as soon as it has seen the cause


def _launcher_serves_a_store() -> bool:
    """Return whether the launcher has told this process of a store."""
    return bool(os.environ.get(STORE_ADDRESS) and os.environ.get(SECRET_KEY))


def _ask(question: Callable[[Store, str], object]) -> None:
    """Call `question` with the store and the key of our note.

    It has a thread and a connection of its own: we may be called from anywhere, at any time.
    """

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):
            worker = os.environ[WORKER_ID] if is_elastic() else str(detect().claim()[0])
            store = launchers_store(os.environ).connect(_PATIENCE)
            question(store, note_key(worker))
            store.close()

    thread = threading.Thread(target=run, name="hvd-loss-note", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        thread.start()
        thread.join(_PATIENCE)
