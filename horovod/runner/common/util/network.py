"""Services that programs of Horovod 0.28.1 spoke to, and the error where none can be reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from horovod.runner.common.unavailable import SERVICE, unavailable


class NoValidAddressesFound(ConnectionError):
    """A service answers at none of the addresses that are known of it."""


class BasicService:
    """Not offered: it unpickles what it gets."""

    def __init__(self, service_name: str, key: bytes, nics: Iterable[str] | None = None) -> None:
        raise unavailable("BasicService", *SERVICE)


class BasicClient:
    """Not offered: it unpickles what it gets."""

    def __init__(
        self,
        service_name: str,
        addresses: Mapping[str, Any],
        key: bytes,
        verbose: int = 1,
        match_intf: bool = False,
        probe_timeout: float = 20,
        attempts: int = 3,
    ) -> None:
        raise unavailable("BasicClient", *SERVICE)
