"""Names of Horovod 0.28.1 whose meaning is not safe to offer.

Upstream's rendezvous and its services serve everybody who reaches their ports. Here ranks and
launcher communicate through a store that serves only holders of the job's key
(`horovod.common.store`). The names of `REFUSED` can be imported; using one raises an error that
says what to use instead.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

from horovod.runner.compute_service import NoValidAddressesFound as NoValidAddressesFound


class _Refusal(NamedTuple):
    reason: str
    replacement: str


_RENDEZVOUS = _Refusal(
    "its rendezvous serves everybody who reaches its port, without authentication",
    "Start jobs with horovodrun or horovod.run, whose store is authenticated with the job's key; "
    "a store of your own is horovod.common.store.StoreServer",
)
_ELASTIC = _Refusal(
    "it tells workers what to do through a rendezvous without authentication",
    "Start elastic jobs with horovodrun or horovod.run (min_num_proc, host_discovery_script), or "
    "with horovod.runner.gloo_run.gloo_run_elastic and a HostDiscovery of your own",
)
_SERVICE = _Refusal(
    "it unpickles what it gets from a socket",
    "Exchange bytes through horovod.common.store (StoreServer, StoreClient)",
)

REFUSED = {
    "RendezvousServer": _RENDEZVOUS,
    "KVStoreServer": _RENDEZVOUS,
    "BasicService": _SERVICE,
    "BasicClient": _SERVICE,
    "launch_gloo": _RENDEZVOUS,
    "launch_gloo_elastic": _RENDEZVOUS,
    "ElasticDriver": _ELASTIC,
    "WorkerStateRegistry": _ELASTIC,
    "create_rendezvous_handler": _ELASTIC,
    "WorkerNotificationService": _ELASTIC,
    "WorkerNotificationClient": _ELASTIC,
    "_task_fn": _SERVICE,
}


@functools.cache
def refuse(name: str) -> type:
    """Return a class that can be imported and derived from, and raises when it is called."""
    reason, replacement = REFUSED[name]
    message = f"{name} of Horovod 0.28.1 is not offered: {reason}. {replacement}"

    def __init__(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(message)

    return type(name, (), {"__doc__": message, "__module__": __name__, "__init__": __init__})


def __getattr__(name: str) -> type:
    if name in REFUSED:
        return refuse(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
