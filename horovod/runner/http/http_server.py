"""The servers of upstream's rendezvous: not offered, because they serve everybody."""

from __future__ import annotations

from horovod.runner.common.unavailable import RENDEZVOUS, unavailable


class KVStoreServer:
    """Not offered: it serves everybody who reaches its port."""

    def __init__(self, verbose: int = 0) -> None:
        raise unavailable("KVStoreServer", *RENDEZVOUS)


class RendezvousServer:
    """Not offered: it serves everybody who reaches its port."""

    def __init__(self, verbose: int = 0) -> None:
        raise unavailable("RendezvousServer", *RENDEZVOUS)
