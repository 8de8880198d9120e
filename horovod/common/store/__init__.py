"""The job's key-value store, in which ranks tell each other who and where they are.

The engine, the transports and the launcher share one small interface, `Store`. Inside one process
it is a `MemoryStore`; in a job the launcher (or rank 0) serves one with a `StoreServer`, and every
rank has a `StoreClient`. A `PrefixStore` gives a caller a name space of its own.
"""

from __future__ import annotations

from horovod.common.store.client import StoreClient
from horovod.common.store.memory import MemoryStore, PrefixStore, Store
from horovod.common.store.server import StoreServer

__all__ = ["MemoryStore", "PrefixStore", "Store", "StoreClient", "StoreServer"]
