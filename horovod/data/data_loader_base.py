"""The base class of data loaders, and a mixin that loads batches in a background thread."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from horovod.common.logging import get_logger

logger = get_logger(__name__)

_PATIENCE = 0.1  # seconds between looks at whether the loader was closed


class BaseDataLoader(ABC):
    """A data loader. A subclass says how many batches an epoch has, and makes them."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many batches an epoch has."""

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the processed batches of one epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return a batch as the training loop gets it; by default unchanged."""
        return batch


class _Failure:
    """An exception of the background thread, on its way to the consumer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Worker:
    """A thread that puts batches into a bounded queue until it is stopped."""

    def __init__(self, loader: BaseDataLoader, size: int) -> None:
        self.queue: queue.Queue[Any] = queue.Queue(size)
        self._loader = loader
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horovod-data-loader", daemon=True)
        self._thread.start()

    def _put(self, item: Any) -> None:
        """Put an item into the queue, and wait for room unless the loader is closed."""
        while not self._stop.is_set():
            try:
                return self.queue.put(item, timeout=_PATIENCE)
            except queue.Full:
                continue

    def _run(self) -> None:
        """Load epoch after epoch."""
        try:
            while not self._stop.is_set():
                # Not the loader's __iter__: _process_batch runs in the consumer's thread.
                for batch in self._loader._iterate():
                    if self._stop.is_set():
                        return
                    self._put(batch)
                self._put(None)
        except BaseException as error:
            self._put(_Failure(error))

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stop.set()
        while True:  # make room, for which the thread may wait
            try:
                self.queue.get_nowait()
            except queue.Empty:
                break
        if self._thread is not threading.current_thread():
            self._thread.join()


class AsyncDataLoaderMixin:
    """Lets a loader work ahead in a background thread.

    It comes before the loader among the base classes:

        class MyAsyncLoader(AsyncDataLoaderMixin, MyLoader): ...

    An exception of the thread is raised where the batches are consumed. After the last batch of an
    epoch the thread goes on with the next epoch.

    Args:
        async_loader_queue_size: The number of batches that may wait; 0 for no thread. Default: 64.
        debug_data_loader: Whether to log when the training loop has to wait. Default: False.
        *args: Arguments for the loader.
        **kwargs: Keyword arguments for the loader.

    Raises:
        ValueError: `async_loader_queue_size` is negative.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(
                f"async_loader_queue_size must be at least 0, not {async_loader_queue_size}"
            )
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._worker: _Worker | None = None
        self._in_epoch = False
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread and drop what it has loaded. Iterating again starts another thread."""
        worker, self._worker = self._worker, None
        self._in_epoch = False
        if worker is not None:
            if self.debug_data_loader:
                logger.info("closing the asynchronous data loader")
            worker.stop()

    def __iter__(self) -> Iterator[Any]:
        """Yield the processed batches of one epoch."""
        assert isinstance(self, BaseDataLoader)
        if self.async_loader_queue_size == 0:
            yield from BaseDataLoader.__iter__(self)
            return
        # The consumer of the last epoch may have taken all batches without asking for more: then
        # the next item is None, the end of that epoch. Else it left in the middle: begin again.
        if self._in_epoch and self._worker is not None and self._worker.queue.get() is not None:
            self.close_async_loader()
        if self._worker is None:
            self._worker = _Worker(self, self.async_loader_queue_size)
        worker = self._worker
        self._in_epoch = True
        while True:
            if self.debug_data_loader and worker.queue.empty():
                logger.info("the training loop waits for data")
            item = worker.queue.get()
            if item is None:
                self._in_epoch = False
                return
            if isinstance(item, _Failure):
                self.close_async_loader()
                raise item.error
            yield self._process_batch(item)

    def __del__(self) -> None:
        if getattr(self, "_worker", None) is not None:
            self.close_async_loader()
