"""Waiting for an engine's messages in a way that can be given up. Called by the Gloo transport.

Gloo does not always wake a thread that waits for a message when the connection breaks: a message
cut in the middle is forgotten by its pair, and the wait lasts until its time limit. A wait that
ran into its limit breaks the whole group, so there are no short limits to be had either. So the
waiting is done by a thread of its own, and the caller waits for that thread or for the news that
the transport has failed, whichever comes first. It also lets the caller notice Ctrl-C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_LEAVE_SECONDS = 1.0
_LOOK_SECONDS = 0.2


class Waiter:
    """Runs one blocking call at a time; `give_up` makes the present and all later ones raise."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="hvd-gloo-wait", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], None], meanwhile: Callable[[], object] | None = None) -> None:
        """Do `call` and raise what it raises; `meanwhile` is called now and then, and may raise."""
        self._busy = True
        self._calls.put(call)
        while True:
            try:
                end = self._ends.get(timeout=None if meanwhile is None else _LOOK_SECONDS)
                break
            except Empty:
                if meanwhile is not None:
                    meanwhile()
        if end is not None:
            raise end
        self._busy = False

    def give_up(self) -> None:
        """Any thread may call. A call that hangs keeps its thread, which nobody waits for."""
        self._ends.put(RuntimeError("the transport has failed"))

    def close(self) -> None:
        self._calls.put(None)
        if not self._busy:
            self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            except BaseException as error:
                self._ends.put(error)
                return  # the group is broken for good
            self._ends.put(None)
            del call
