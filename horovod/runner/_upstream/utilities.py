"""Helpers that programs of Horovod 0.28.1 import: a cache, shell commands, threads and a pipe.

Horovod's own launcher keeps nothing between jobs; `Cache` is for programs that used upstream's. Its
file holds Python literals, so that reading one never runs what somebody wrote into it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO, TypeVar

from horovod.common.logging import get_logger
from horovod.runner.agents.local_host import find_descendants, signal_all, signal_groups
from horovod.runner.output.console import Source
from horovod.runner.output.lines import LineSplitter

F = TypeVar("F", bound=Callable[..., Any])

_FILE = "cache.bin"


class Cache:
    """Keeps values by key for `cache_staleness_threshold_in_minutes`.

    Values that are not Python literals are kept in memory only. A file that was written with other
    parameters (`parameters_hash`), or that cannot be read, counts as empty.
    """

    def __init__(
        self,
        cache_folder: str,
        cache_staleness_threshold_in_minutes: float,
        parameters_hash: str,
    ) -> None:
        self._file = os.path.join(os.path.expanduser(cache_folder), _FILE)
        self._seconds = cache_staleness_threshold_in_minutes * 60
        self._parameters = parameters_hash
        self._lock = threading.Lock()
        self._kept = self._read()  # key -> (when, value)

    def get(self, key: Any) -> Any:
        """Return the value of a key; None if there is none, or it is too old."""
        with self._lock:
            when, value = self._kept.get(key, (0.0, None))
        return value if 0 <= time.time() - when < self._seconds else None

    def put(self, key: Any, val: Any) -> None:
        with self._lock:
            self._kept[key] = (time.time(), val)
            with contextlib.suppress(OSError):  # a cache that cannot be written is in memory only
                self._write()

    def _read(self) -> dict[Any, tuple[float, Any]]:
        try:
            with open(self._file, encoding="utf-8") as file:
                parameters, kept = ast.literal_eval(file.read())
            found = {key: (float(when), value) for key, (when, value) in kept.items()}
        except (OSError, ValueError, TypeError, SyntaxError, AttributeError, RecursionError):
            return {}
        return found if parameters == self._parameters else {}

    def _write(self) -> None:
        folder = os.path.dirname(self._file)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        kept = {key: entry for key, entry in self._kept.items() if _is_literal((key, entry))}
        handle, part = tempfile.mkstemp(dir=folder)  # readable by the user only
        with open(handle, "w", encoding="utf-8") as file:
            file.write(repr((self._parameters, kept)))
        os.replace(part, self._file)


def use_cache() -> Callable[[F], F]:
    """Return a decorator: the function uses the cache that its caller passes as `fn_cache`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def cached(*args: Any, **kwargs: Any) -> Any:
            cache = kwargs.pop("fn_cache", None)
            if cache is None:
                return function(*args, **kwargs)
            key = (function.__name__, repr(args), repr(sorted(kwargs.items())))
            found = cache.get(key)
            if found is None:
                found = function(*args, **kwargs)
                cache.put(key, found)
            return found

        return cached  # type: ignore[return-value]

    return decorate


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


GRACEFUL_TERMINATION_TIME_S = 5
_LOOK_SECONDS = 0.1


def execute(
    command: str | Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    index: int | None = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run a command to its end. If this call is interrupted, everything that it started is ended.

    Args:
        command: A text for a shell, or a program with its arguments.
        env: The environment; by default that of this process.
        stdout: Where its stdout goes; by default to that of this process.
        stderr: Where its stderr goes; by default to that of this process.
        index: The number in ``[index]<stream>:`` before each line; by default there is no prefix.
        events: When one of these is set, the command and everything that it started are ended.
        prefix_output_with_timestamp: Whether the prefix begins with the time.

    Returns:
        The exit status, 128+n after signal n.
    """
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    writers = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
    pumps = [
        threading.Thread(
            target=_pump,
            args=(getattr(process, name), out, index, name, prefix_output_with_timestamp),
        )
        for name, out in writers.items()
    ]
    for pump in pumps:
        pump.start()
    try:
        code = _wait(process, events or ())
    finally:
        terminate_executor_shell_and_children(process.pid)
        process.wait()
        for pump in pumps:
            pump.join()
    return code if code >= 0 else 128 - code


def terminate_executor_shell_and_children(pid: int) -> None:
    """Kill a process that leads a session, with all that it started."""
    members = find_descendants(pid)
    signal_all(members, signal.SIGKILL)
    signal_groups([pid], signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], events: Sequence[threading.Event]) -> int:
    while True:
        try:
            return process.wait(_LOOK_SECONDS if events else None)
        except subprocess.TimeoutExpired:
            if not any(event.is_set() for event in events):
                continue
        signal_groups([process.pid], signal.SIGTERM)
        try:
            return process.wait(GRACEFUL_TERMINATION_TIME_S)
        except subprocess.TimeoutExpired:
            terminate_executor_shell_and_children(process.pid)
            return process.wait()


def _pump(pipe: Any, out: TextIO, index: int | None, stream: str, timestamps: bool) -> None:
    source = None if index is None else Source(index, stream)
    splitter = LineSplitter()
    while True:
        data = pipe.read1(1 << 16)
        lines = splitter.feed(data) if data else splitter.finish()
        for line in lines:
            shown = (source.line_prefix(timestamps) if source else b"") + line.text + line.end
            out.write(shown.decode(errors="replace"))
        out.flush()
        if not data:
            pipe.close()
            return


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `target(*args)` in a new thread; with `silent` its errors are not logged."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args).__name__}")

    def call() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                get_logger(__name__).exception("%r failed in its thread", target)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
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

    def wait(*given: Any) -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*given)

    return in_thread(wait, args, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Iterable[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn` with each of the arguments at the same time, and return the results by index.

    Without `block_until_all_done` it waits for nothing, and returns nothing.
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
    """A pipe between threads: `read` waits for what is written, and `write` for the reader."""

    def __init__(self) -> None:
        self._content = ""
        self._closed = False
        self._changed = threading.Condition()

    def write(self, buf: str) -> None:
        """Wait until earlier text has been read, then write this one."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._content)
            if self._closed:
                raise RuntimeError("the pipe is closed")
            self._content = buf
            self._changed.notify_all()

    def read(self, length: int = -1, timeout: float | None = None) -> str | None:
        """Return up to `length` characters; None after `timeout` seconds or when it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._content, timeout)
            if not self._content:
                return None
            end = len(self._content) if length < 0 else length
            part, self._content = self._content[:end], self._content[end:]
            self._changed.notify_all()
            return part

    def flush(self) -> None:
        """Do nothing: a pipe holds nothing back."""

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
