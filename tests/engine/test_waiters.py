"""Threads that wait for what another one runs, without any processes."""

from __future__ import annotations

import threading

from horovod.engine.agreement.waiters import Waiters

PATIENCE = 60.0


def test_whoever_waits_is_told():
    waiters, here = Waiters(), threading.Event()

    def is_second_look() -> bool:
        was_here = here.is_set()
        here.set()
        return was_here

    thread = threading.Thread(target=waiters.wait_for, args=(is_second_look,), daemon=True)
    thread.start()
    assert here.wait(PATIENCE)
    waiters.tell()  # gets the lock only once the thread waits, which lets go of it
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert waiters.number == 0


def test_nobody_waits_longer_than_it_wanted():
    waiters = Waiters()
    seen = set()

    def never() -> bool:
        seen.add(waiters.number)
        return False

    waiters.wait_for(never, 0.001)
    assert seen == {1}
    assert waiters.number == 0
    waiters.tell()
