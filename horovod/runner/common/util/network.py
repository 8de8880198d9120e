"""The error for a service that cannot be reached, raised by clients of `horovod.runner.common`."""

from __future__ import annotations


class NoValidAddressesFound(ConnectionError):
    """A service answers at none of the addresses that are known of it."""
