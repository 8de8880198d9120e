"""The queue of a process set, without any processes."""

from __future__ import annotations

import pytest

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.agreement.request_queue import RequestQueue
from horovod.engine.collective import Collective, Kind
from horovod.engine.request import Request


def _request(name: str) -> Request:
    return Request(None, Collective(Kind.BARRIER, name), name, b"8 bytes.")


def _filled(*names: str) -> RequestQueue:
    queue = RequestQueue()
    for name in names:
        queue.append(_request(name))
    return queue


def _names(queue: RequestQueue) -> list[str]:
    return [request.name for request in queue.copy()]


def test_requests_stay_in_the_order_of_submission():
    queue = _filled("b", "a", "c")
    assert _names(queue) == ["b", "a", "c"]
    assert queue.grown.is_set()
    queue.put_first(_request("z"))
    assert _names(queue) == ["z", "b", "a", "c"]


@pytest.mark.parametrize("gone", ["", "a", "ab", "b", "ca", "abc"])
def test_those_that_have_run_leave_the_others_in_order(gone: str):
    queue = _filled("a", "b", "c")
    known = {request.name: request for request in queue.requests}
    queue.remove([known[name] for name in gone])
    assert _names(queue) == [name for name in "abc" if name not in gone]
    for name in gone:
        queue.append(_request(name))  # names are free again


def test_a_name_is_refused_while_it_is_in_flight():
    queue = _filled("a")
    queue.put_first(_request("b"))
    for name in "ab":
        with pytest.raises(ValueError, match=f"'{name}' was submitted at .*test_request_queue.py:"):
            queue.append(_request(name))
    assert _names(queue) == ["b", "a"]


def test_automatic_names_count_by_kind_and_begin_anew():
    queue = RequestQueue()
    assert [queue.auto_name(Kind.BARRIER) for _ in range(2)] == ["noname.1", "noname.2"]
    assert queue.auto_name(Kind.JOIN) == "noname.1"
    queue.restart_auto_names()
    assert queue.auto_name(Kind.BARRIER) == "noname.1"


def test_a_closed_queue_hands_over_what_is_left_and_keeps_the_first_reason():
    queue = _filled("a", "b")
    queue.grown.clear()
    assert [request.name for request in queue.close(HorovodInternalError("first"))] == ["a", "b"]
    assert queue.grown.is_set()  # whoever waits for more looks again
    assert queue.close(HorovodInternalError("second")) == []
    with pytest.raises(HorovodInternalError, match="first"):
        queue.append(_request("c"))
    assert queue.requests == []
