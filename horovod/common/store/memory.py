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
from collections.abc import Callable, Iterable, Sequence


class Store(ABC):
    """A key-value store: keys are text, values are bytes. Any thread may call any method."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key, in place of an earlier one."""

    def get(self, key: str, timeout: float) -> bytes:
        """Return a key's value, and wait until somebody sets it.

        Raises:
            TimeoutError: Nobody has set it within `timeout` seconds.
        """
        return self.get_any([key], timeout)[1]

    @abstractmethod
    def get_any(self, keys: Sequence[str], timeout: float) -> tuple[str, bytes]:
        """Return the first of some keys that has a value, with the value; wait until one has.

        Raises:
            TimeoutError: Nobody has set one of them within `timeout` seconds.
        """

    @abstractmethod
    def try_get(self, key: str) -> bytes | None:
        """Return a key's value, or None if nobody has set it yet."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum, in one atomic step.

        The value of a counter is its decimal digits. A missing key counts as 0.

        Raises:
            ValueError: The value of the key is not a counter.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a key, and return whether it existed."""

    @abstractmethod
    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""

    @abstractmethod
    def derive_key(self, purpose: str) -> bytes:
        """Return 32 secret bytes that all users of this store share, different for each purpose.

        They are computed from the key that protects the store, so nothing travels.
        """

    def close(self) -> None:  # noqa: B027 (optional for stores that hold nothing)
        """Release the connections of this object. The values stay where they are kept."""


def derive(key: bytes, purpose: str) -> bytes:
    """Return the secret bytes for a purpose, made from the key of a store."""
    return hmac.new(key, b"purpose " + purpose.encode(), hashlib.sha256).digest()


def timeout_error(key: str, timeout: float) -> TimeoutError:
    """Return the error of a `get` that has waited too long."""
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

    def get_any(self, keys: Sequence[str], timeout: float) -> tuple[str, bytes]:
        key, value = self._store.get_any([self._prefix + key for key in keys], timeout)
        return key[len(self._prefix) :], value

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
        self.secret = secrets.token_bytes(32)  # a `StoreServer` puts its own key here

    def watch(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the key after every change of a value. It must return soon."""
        self._watchers.append(callback)

    def set(self, key: str, value: bytes) -> None:
        self.set_unless(key, value, ())

    def set_unless(self, key: str, value: bytes, obstacles: Iterable[str]) -> bool:
        """Set a key unless one of `obstacles` is set, and return whether it was set.

        Nobody can set one of these in between.
        """
        with self._changed:
            if not self._values.keys().isdisjoint(obstacles):
                return False
            self._values[key] = bytes(value)
            self._changed.notify_all()
        self._call_watchers(key)
        return True

    def get_any(self, keys: Sequence[str], timeout: float) -> tuple[str, bytes]:
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for key in keys:
                    if key in self._values:
                        return key, self._values[key]
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(min(left, threading.TIMEOUT_MAX)):
                    raise timeout_error(keys[0], timeout)

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
        self._call_watchers(key)
        return total

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def keys(self, prefix: str) -> list[str]:
        with self._changed:
            return sorted(key for key in self._values if key.startswith(prefix))

    def derive_key(self, purpose: str) -> bytes:
        return derive(self.secret, purpose)

    def _call_watchers(self, key: str) -> None:
        """Call the watchers, without the lock: they may use the store themselves."""
        for callback in self._watchers:
            callback(key)
