"""The base of data loaders, and a mixin that loads the next batches in a background thread."""

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
    """A loader says how many batches an epoch has, and makes them."""

    @abstractmethod
    def __len__(self) -> int:
        """How many batches an epoch has."""

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """The batches of one epoch."""

    def __iter__(self) -> Iterator[Any]:
        """The processed batches of one epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """What is done to each batch before the training loop gets it."""
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
        while not self._stop.is_set():
            try:
                return self.queue.put(item, timeout=_PATIENCE)
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                # Always the loader's own _iterate: _process_batch belongs to the consumer's thread.
                for batch in self._loader._iterate():
                    if self._stop.is_set():
                        return
                    self._put(batch)
                self._put(None)
        except BaseException as error:
            self._put(_Failure(error))

    def stop(self) -> None:
        self._stop.set()
        while True:  # wake a thread that waits for room
            try:
                self.queue.get_nowait()
            except queue.Empty:
                break
        if self._thread is not threading.current_thread():
            self._thread.join()


class AsyncDataLoaderMixin:
    """Loads ahead in a background thread; put it before the loader among the bases.

        class MyAsyncLoader(AsyncDataLoaderMixin, MyLoader): ...

    At most `async_loader_queue_size` batches wait (0: no thread). None in the queue ends an epoch;
    the thread goes on with the next one. What it raises is raised where the batches are consumed.
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
        """End the thread and forget what it has loaded; iterating again starts another."""
        worker, self._worker = self._worker, None
        self._in_epoch = False
        if worker is not None:
            if self.debug_data_loader:
                logger.info("closing the asynchronous data loader")
            worker.stop()

    def __iter__(self) -> Iterator[Any]:
        """The processed batches of one epoch."""
        assert isinstance(self, BaseDataLoader)
        if self.async_loader_queue_size == 0:
            yield from BaseDataLoader.__iter__(self)
            return
        # A consumer that knows the length takes that many and never asks for the end.
        if self._in_epoch and self._worker is not None and self._worker.queue.get() is not None:
            self.close_async_loader()  # it left in the middle: begin a new epoch
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
