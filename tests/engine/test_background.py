"""The background thread of a channel, without any processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from horovod.engine.agreement.background import BackgroundThread
from horovod.engine.agreement.request_queue import RequestQueue
from horovod.engine.collective import Collective, Kind
from horovod.engine.request import Request

PATIENCE = 60.0


class Work:
    """Rounds that take one request each, and say who ran them."""

    def __init__(self) -> None:
        self.queue = RequestQueue()
        self.run: queue.Queue[tuple[str, str]] = queue.Queue()
        self.thread = BackgroundThread("horovod-test", self.queue, cycle=0.0)

    def submit(self, name: str) -> None:
        self.queue.append(Request(None, Collective(Kind.BARRIER, name), name, b"8 bytes."))

    def ring(self) -> None:
        self.thread.ring(self._round)

    def _round(self) -> None:
        first = self.queue.requests[0]
        self.queue.remove([first])
        self.run.put((first.name, threading.current_thread().name))


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.thread.close()
    made.thread.join(PATIENCE)


def test_it_runs_rounds_until_the_queue_is_empty_and_again_when_it_is_rung(work: Work):
    for names in (["a", "b"], ["c"]):
        for name in names:
            work.submit(name)
        work.ring()
        for name in names:
            assert work.run.get(timeout=PATIENCE) == (name, "horovod-test")
    assert work.queue.requests == []


def test_it_does_not_exist_before_it_is_needed_and_ends_when_it_is_closed(work: Work):
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "horovod-test"]

    work.submit("a")
    assert threads() == []
    work.ring()
    work.run.get(timeout=PATIENCE)
    (thread,) = threads()
    work.thread.close()
    work.thread.join(PATIENCE)
    assert not thread.is_alive()


def test_what_comes_after_it_was_closed_stays(work: Work):
    work.thread.close()
    work.submit("late")
    work.ring()
    work.thread.join(PATIENCE)
    assert [request.name for request in work.queue.requests] == ["late"]


def test_what_is_large_enough_does_not_wait_for_more(work: Work):
    """The gathering would last five hours, and its thread could not be ended."""
    work.thread.cycle = 3600.0
    tensors = [torch.empty(1 << 16), torch.empty(0), torch.empty(1 << 15)]
    collective = Collective(Kind.ALLREDUCE, "large")
    work.queue.append(Request(None, collective, "large", b"8 bytes.", tensors))
    work.ring()
    assert work.run.get(timeout=PATIENCE)[0] == "large"
