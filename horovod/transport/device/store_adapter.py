"""Our store as a `torch.distributed.Store`, so that torch's process groups use it to connect.

Our store is authenticated; torch's own TCPStore answers anybody who reaches its port. Used by the
device transports.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store as _TorchStore  # typed, unlike torch.distributed.Store

from horovod.common.store import Store


class StoreForTorch(_TorchStore):
    """The keys and values of `store`, for torch.

    All calls together have one deadline, `timeout` seconds after the creation: a process group
    makes many calls while it connects. The caller that gives this object to torch must keep it,
    because torch keeps only its own half of the object, which cannot answer. The methods have the
    names under which torch's C++ code looks for them.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._deadline = time.monotonic() + timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, _encode(value))

    def get(self, key: str) -> bytes:
        return self._store.get(key, self._remaining())

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return all(self._store.try_get(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._remaining()
        if timeout is not None:
            limit = min(limit, timeout.total_seconds())
        deadline = time.monotonic() + limit
        for key in keys:
            self._store.get(key, max(deadline - time.monotonic(), 0))

    def deleteKey(self, key: str) -> bool:
        return self._store.delete(key)

    def getNumKeys(self) -> int:
        return len(self._store.keys(""))

    def _remaining(self) -> float:
        """Return the seconds until the deadline."""
        return max(self._deadline - time.monotonic(), 0)


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
