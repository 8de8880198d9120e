"""The rendezvous of upstream's elastic jobs: not offered, because it serves everybody."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.unavailable import ELASTIC, unavailable

GET_RANK_AND_SIZE = "rank_and_size"
PUT_WORKER_ADDRESSES = "worker_addresses"


def create_rendezvous_handler(driver: Any) -> Any:
    """Not offered: workers learn of decisions through the job's store, which has a key."""
    raise unavailable("create_rendezvous_handler", *ELASTIC)
