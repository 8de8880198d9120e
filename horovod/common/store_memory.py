"""The store's interface, and the store inside one process.

Imported through `horovod.common.store`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable


class Store(ABC):
    """String keys, bytes values, atomic counters. All methods may be called from any thread."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store a value, replacing any other."""

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """The key's value, waiting until somebody sets it; `TimeoutError` after ``timeout`` s."""

    @abstractmethod
    def try_get(self, key: str) -> bytes | None:
        """The key's value now, or None."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a counter (a missing key counts as 0) and return the sum.

        A counter's value reads as decimal digits; `ValueError` when the key holds something else.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a key; whether it existed."""

    @abstractmethod
    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with ``prefix``, sorted."""

    @abstractmethod
    def derive_key(self, purpose: str) -> bytes:
        """32 secret bytes that all users of this store share, other ones for each purpose.

        Made from the key that the store itself is protected by; nothing of it travels.
        """

    def close(self) -> None:  # noqa: B027 (optional for stores that hold nothing)
        """Release what this object holds; the values live on where they are kept."""


def derived(key: bytes, purpose: str) -> bytes:
    return hmac.new(key, b"purpose " + purpose.encode(), hashlib.sha256).digest()


def timed_out(key: str, timeout: float) -> TimeoutError:
    return TimeoutError(f"nobody set {key!r} in the job's store within {timeout:g} s")


class PrefixStore(Store):
    """A part of another store: every key gets ``prefix/`` in front. Closing it closes nothing."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = f"{prefix}/"

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, timeout: float) -> bytes:
        return self._store.get(self._prefix + key, timeout)

    def try_get(self, key: str) -> bytes | None:
        return self._store.try_get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def delete(self, key: str) -> bool:
        return self._store.delete(self._prefix + key)

    def keys(self, prefix: str) -> list[str]:
        return [key[len(self._prefix) :] for key in self._store.keys(self._prefix + prefix)]

    def derive_key(self, purpose: str) -> bytes:
        return self._store.derive_key(self._prefix + purpose)


class MemoryStore(Store):
    """A store inside this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._watchers: list[Callable[[str], None]] = []
        self.secret = secrets.token_bytes(32)  # or the key of the server that serves it

    def watch(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(key)`` after every change that gives a key a value. It must be quick."""
        self._watchers.append(callback)

    def set(self, key: str, value: bytes) -> None:
        value = bytes(value)
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        self._tell(key)

    def get(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        with self._changed:
            while key not in self._values:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(min(left, threading.TIMEOUT_MAX)):
                    raise timed_out(key, timeout)
            return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            current = self._values.get(key, b"0")
            try:
                total = int(current) + amount
            except ValueError:
                raise ValueError(f"{key!r} in the job's store is not a counter") from None
            self._values[key] = b"%d" % total
            self._changed.notify_all()
        self._tell(key)
        return total

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def keys(self, prefix: str) -> list[str]:
        with self._changed:
            return sorted(key for key in self._values if key.startswith(prefix))

    def derive_key(self, purpose: str) -> bytes:
        return derived(self.secret, purpose)

    def _tell(self, key: str) -> None:
        for callback in self._watchers:
            callback(key)
