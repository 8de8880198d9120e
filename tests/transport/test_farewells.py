"""Calls that end a library: they and what wants quiet take turns."""

from __future__ import annotations

import gc
import threading
import weakref

from horovod.transport.device.farewells import (
    finish_or_end_process,
    finish_or_leave,
    none_under_way,
)

PATIENCE = 30.0


def test_quiet_begins_when_calls_have_ended():
    began, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def call() -> None:
        began.set()
        assert may_end.wait(PATIENCE)
        order.append("call")

    def be_quiet() -> None:
        with none_under_way():
            order.append("quiet")

    finish_or_leave(call, "could not end", seconds=0)
    assert began.wait(PATIENCE)
    quiet = threading.Thread(target=be_quiet)
    quiet.start()
    may_end.set()
    quiet.join(PATIENCE)
    assert order == ["call", "quiet"]


def test_calls_wait_until_quiet_is_over():
    ended = threading.Event()
    with none_under_way():
        finish_or_leave(ended.set, "could not end", seconds=0)
        assert not ended.wait(0.1)
    assert ended.wait(PATIENCE)


def test_what_ends_as_garbage_waits_too():
    """As the lane of an optimizer that the collector finds."""

    class Lane:
        pass

    ended = threading.Event()
    lane = Lane()
    weakref.finalize(lane, finish_or_leave, ended.set, "could not end", 0)
    with none_under_way():
        del lane
        gc.collect()
        assert not ended.wait(0.1)
    assert ended.wait(PATIENCE)


def test_a_call_that_ends_another_does_not_wait_for_itself():
    ended = threading.Event()

    def outer() -> None:
        finish_or_leave(ended.set, "could not end the inner one", seconds=PATIENCE)

    finish_or_leave(outer, "could not end the outer one", seconds=0)
    with none_under_way():
        assert ended.is_set()


def test_an_abort_never_waits():
    aborted = threading.Event()
    with none_under_way():
        finish_or_end_process(aborted.set, "could not abort")
        assert aborted.wait(PATIENCE)
