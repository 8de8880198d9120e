"""Results of checks that are kept for some minutes, in memory and in a file.

Horovod's own launcher keeps nothing between jobs; this is for programs that used upstream's cache.
The file holds Python literals, so that reading one never runs what somebody wrote into it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_FILE = "cache.bin"


class Cache:
    """Values by key, for `cache_staleness_threshold_in_minutes`.

    What is not made of Python's literals is kept in memory only. A file that was written with other
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
        """What was put there; None if nothing, or too long ago."""
        with self._lock:
            when, value = self._kept.get(key, (0.0, None))
        return value if 0 <= time.time() - when < self._seconds else None

    def put(self, key: Any, val: Any) -> None:
        with self._lock:
            self._kept[key] = (time.time(), val)
            with contextlib.suppress(OSError):  # a cache that cannot be written is no cache
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
    """Makes a function look into the cache that its caller gives as `fn_cache`, if any."""

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
