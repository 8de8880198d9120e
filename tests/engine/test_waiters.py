"""Threads that wait for what another one runs, without any processes."""

from __future__ import annotations

import threading

from horovod.engine.waiters import Waiters

PATIENCE = 60.0


def test_whoever_waits_is_told():
    waiters, here, told = Waiters(), threading.Event(), []

    def wait() -> None:
        with waiters.joined() as until_told:
            here.set()
            told.append(until_told(PATIENCE))

    thread = threading.Thread(target=wait)
    thread.start()
    assert here.wait(PATIENCE)
    waiters.tell()  # gets the lock only once the thread waits, which lets go of it
    thread.join(PATIENCE)
    assert told == [True]
    assert waiters.number == 0


def test_nobody_waits_longer_than_it_wanted():
    waiters = Waiters()
    with waiters.joined() as until_told:
        assert waiters.number == 1
        assert not until_told(0.001)
    waiters.tell()
