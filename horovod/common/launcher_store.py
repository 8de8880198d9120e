"""Where the launcher serves the job's store, as it tells its workers by environment.

Read by `horovod.common.rendezvous` and, in an elastic job, by `horovod.common.membership`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from horovod.common.store import StoreClient
from horovod.common.wire import decode_key

SECRET_KEY = "_HOROVOD_SECRET_KEY"
STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"


@dataclass(frozen=True)
class StoreAddress:
    """Where the job's store is. The key is kept out of every representation."""

    address: str
    port: int
    key: bytes

    def __repr__(self) -> str:
        return f"StoreAddress({self.address}:{self.port})"

    def connect(self, timeout: float) -> StoreClient:
        return StoreClient(self.address, self.port, self.key, timeout)


def launchers_store(environ: Mapping[str, str]) -> StoreAddress:
    """What the launcher told; `ValueError` when that is incomplete."""
    port = environ.get(STORE_PORT, "")
    if not environ.get(STORE_ADDRESS) or not port.isdecimal() or not environ.get(SECRET_KEY):
        raise ValueError(
            f"the launcher did not say where the job's store is: "
            f"{STORE_ADDRESS}={environ.get(STORE_ADDRESS) or 'unset'}, "
            f"{STORE_PORT}={port or 'unset'}, "
            f"{SECRET_KEY} {'set' if environ.get(SECRET_KEY) else 'unset'}. Start the job with "
            f"horovodrun, which sets all three"
        )
    return StoreAddress(environ[STORE_ADDRESS], int(port), decode_key(environ[SECRET_KEY]))
