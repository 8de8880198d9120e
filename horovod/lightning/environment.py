"""The cluster environment, which tells Lightning the rank and size that `hvd.init()` found.

`hvd.init()` knows horovodrun, torchrun, mpirun, srun, jsrun and Kubernetes, so Lightning need not.
The Horovod strategies make such an environment themselves. Other strategies take it as a plugin:
with ``Trainer(strategy="ddp", plugins=[HorovodEnvironment()])`` DDP finds its peers under
horovodrun.
"""

from __future__ import annotations

import functools
import socket
from typing import Any

import horovod.torch as hvd
from horovod.common.joining.addresses import LOOPBACK, routable_address
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.runtime import runtime
from horovod.lightning.flavours import Flavour, join_with_base


class Environment:
    """Gives Lightning the ranks and sizes of `hvd.init()`, under any launcher that it knows.

    Args:
        process_set: The ranks that make up the job for Lightning; all ranks by default. A rank that
            is not in the set trains by itself, as a job of one.
    """

    flavour: Flavour

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self._process_set = process_set
        self._main_endpoint: tuple[str, int] | None = None

    @staticmethod
    def detect() -> bool:
        """Return False: the environment is used only where a program asks for Horovod."""
        return False

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def global_rank(self) -> int:
        hvd.init()
        rank = self._process_set.rank() if self._process_set.included() else 0
        return 0 if rank is None else rank

    def world_size(self) -> int:
        hvd.init()
        size = self._process_set.size() if self._process_set.included() else 1
        return 1 if size is None else size

    def local_rank(self) -> int:
        hvd.init()
        return hvd.local_rank()

    def node_rank(self) -> int:
        hvd.init()
        return hvd.cross_rank()

    def set_global_rank(self, rank: int) -> None:
        """Ignore `rank`: Horovod decides the ranks."""

    def set_world_size(self, size: int) -> None:
        """Ignore `size`: Horovod decides the size."""

    @property
    def main_address(self) -> str:
        return self._find_main_endpoint()[0]

    @property
    def main_port(self) -> int:
        return self._find_main_endpoint()[1]

    def _find_main_endpoint(self) -> tuple[str, int]:
        """Return an address and a free port of rank 0, for strategies with their own connections.

        The first call is a collective.
        """
        if self._main_endpoint is None:
            hvd.init()
            endpoint: Any = None
            if hvd.rank() == 0:
                one_host = hvd.local_size() == hvd.size()
                address = LOOPBACK if one_host else routable_address(runtime.config.gloo_iface)
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    endpoint = (address, probe.getsockname()[1])
            self._main_endpoint = hvd.broadcast_object(endpoint, 0, "lightning.meeting_point")
        return self._main_endpoint

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: the strategies check these settings, in `horovod.lightning.base`."""

    def teardown(self) -> None:
        """Leave the engine running: a program may fit again, or call collectives itself."""


@functools.cache
def environment_class(flavour: Flavour) -> Any:
    """Make the cluster environment for this package's Trainer and Fabric."""
    base = flavour.fabric_part("plugins.environments").ClusterEnvironment
    return join_with_base("HorovodEnvironment", Environment, base, flavour)
