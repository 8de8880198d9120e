"""The address of the store that the launcher serves; environment variables tell it to workers.

Read by `rendezvous` and, in an elastic job, by `horovod.common.generations.membership`.
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
    """Address, port and key of the job's store. No text form of this object shows the key."""

    address: str
    port: int
    key: bytes

    def __repr__(self) -> str:
        return f"StoreAddress({self.address}:{self.port})"

    def connect(self, timeout: float) -> StoreClient:
        """Return a client of the store; see `StoreClient`."""
        return StoreClient(self.address, self.port, self.key, timeout)


def launchers_store(environ: Mapping[str, str]) -> StoreAddress:
    """Return the address at which the launcher serves the job's store.

    Args:
        environ: The variables that the launcher has set.

    Raises:
        ValueError: Some of the variables are missing.
    """
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
