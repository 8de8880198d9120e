"""Functions in threads, and a pipe between threads, for programs of Horovod 0.28.1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from horovod.common.logging import get_logger


def _guarded(target: Callable[..., Any], silent: bool) -> Callable[..., None]:
    def call(*args: Any) -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                get_logger(__name__).exception("%r failed in its thread", target)

    return call


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `target(*args)` in a thread of its own; with `silent` its errors are not logged."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args).__name__}")
    thread = threading.Thread(target=_guarded(target, silent), args=args, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `func(*args)` once `event` is set, in a thread; never after `stop` was set first."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args).__name__}")

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Iterable[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn` with each of the arguments, at once; what each returned, by its index.

    Without `block_until_all_done` nothing is returned or waited for.
    """
    calls = [tuple(args) for args in args_list]
    if not calls:
        return {} if block_until_all_done else None
    pool = ThreadPoolExecutor(min(len(calls), max_concurrent_executions))
    futures = [pool.submit(fn, *args) for args in calls]
    pool.shutdown(wait=block_until_all_done)
    if not block_until_all_done:
        return None
    return {index: future.result() for index, future in enumerate(futures)}


class Pipe:
    """What is written can be read once; `read` waits for it, and `write` for the reader."""

    def __init__(self) -> None:
        self._content = ""
        self._closed = False
        self._changed = threading.Condition()

    def write(self, buf: str) -> None:
        """Waits until what was written before has been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._content)
            if self._closed:
                raise RuntimeError("the pipe is closed")
            self._content = buf
            self._changed.notify_all()

    def read(self, length: int = -1, timeout: float | None = None) -> str | None:
        """Up to `length` characters; None after `timeout` seconds, or once the pipe is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._content, timeout)
            if not self._content:
                return None
            end = len(self._content) if length < 0 else length
            part, self._content = self._content[:end], self._content[end:]
            self._changed.notify_all()
            return part

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
