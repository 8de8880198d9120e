"""The error for names of Horovod 0.28.1 that stand for something that is not safe to offer.

Upstream's rendezvous and its services listen for everybody who reaches the port. Here all that
ranks and launcher tell each other goes through a store that knows only holders of the job's key
(`horovod.common.store`). Modules under the old names raise this, with what to use instead.
"""

from __future__ import annotations


def unavailable(name: str, reason: str, instead: str) -> NotImplementedError:
    """Why `name` cannot be had, and the new way."""
    return NotImplementedError(f"{name} of Horovod 0.28.1 is not offered: {reason}. {instead}")


RENDEZVOUS = (
    "its rendezvous serves everybody who reaches its port, without authentication",
    "Start jobs with horovodrun or horovod.run, whose store is authenticated with the job's key; "
    "a store of your own is horovod.common.store.StoreServer",
)
ELASTIC = (
    "it tells workers what to do through a rendezvous without authentication",
    "Start elastic jobs with horovodrun or horovod.run (min_num_proc, host_discovery_script), or "
    "with horovod.runner.gloo_run.gloo_run_elastic and a HostDiscovery of your own",
)
SERVICE = (
    "it unpickles what it gets from a socket",
    "Exchange bytes through horovod.common.store (StoreServer, StoreClient)",
)
