"""Horovod on a Ray cluster: `RayExecutor` starts ranks as Ray actors and calls functions on them.

`runner` (`RayExecutor`) chooses an adapter: `static` (a fixed set of workers, for which `strategy`
finds room) or `elastic_v2` (workers that come and go: the elastic driver of `horovod.runner` starts
them on the nodes of `node_set`). `worker` is the actor, `coordinator` numbers the ranks and serves
the job's store, `ray_logger` passes messages of workers to callbacks. `train` has the trainer for
Ray Train, `elastic` an old name. Needs ``pip install 'horovod[ray]'``.
"""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"horovod.ray needs Ray, which cannot be imported ({error}): pip install 'horovod[ray]'"
    ) from error

from horovod.ray.elastic import ElasticRayExecutor
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
