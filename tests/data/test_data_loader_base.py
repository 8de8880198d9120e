"""BaseDataLoader and AsyncDataLoaderMixin."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, count: int, fail_at: int | None = None) -> None:
        self.count = count
        self.fail_at = fail_at
        self.made = 0
        super().__init__()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[Any]:
        for number in range(self.count):
            if number == self.fail_at:
                raise OSError("the disk is gone")
            self.made += 1
            yield number

    def _process_batch(self, batch: Any) -> Any:
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "horovod-data-loader"]


def test_batches_are_processed():
    assert list(Numbers(3)) == [0, 10, 20]
    assert len(Numbers(3)) == 3


@pytest.mark.parametrize("queue_size", [0, 1, 64])
def test_several_epochs(queue_size: int):
    loader = AsyncNumbers(queue_size, False, 5)
    assert [list(loader) for _ in range(3)] == [[0, 10, 20, 30, 40]] * 3
    assert bool(threads()) == (queue_size > 0)
    loader.close_async_loader()
    assert not threads()
    assert list(loader) == [0, 10, 20, 30, 40], "iterating again starts again"
    loader.close_async_loader()


def test_no_more_batches_wait_than_the_queue_holds():
    loader = AsyncNumbers(2, False, 1000)
    for number, _ in zip(range(4), loader, strict=False):
        # Taken, waiting in the queue, and one in the thread's hand.
        assert loader.made <= number + 1 + 2 + 1
    loader.close_async_loader()


@pytest.mark.parametrize("queue_size", [0, 1, 64])
def test_consumers_that_do_not_ask_for_the_end(queue_size: int):
    """As Lightning does: it takes as many batches as the loader is long."""
    loader = AsyncNumbers(queue_size, False, 3)
    for taken in (3, 3, 2, 3, 1, 3):
        assert list(itertools.islice(iter(loader), taken)) == [0, 10, 20][:taken]
    loader.close_async_loader()


@pytest.mark.parametrize("queue_size", [0, 4])
def test_what_the_thread_raises_is_raised_to_the_consumer(queue_size: int):
    loader = AsyncNumbers(queue_size, True, 5, fail_at=2)
    found = iter(loader)
    assert list(itertools.islice(found, 2)) == [0, 10]
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    assert not threads()


def test_a_negative_queue_is_refused():
    with pytest.raises(ValueError, match="async_loader_queue_size"):
        AsyncNumbers(-1, False, 5)
