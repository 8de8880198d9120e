"""The cluster environment: who this process is, for Lightning, as `hvd.init()` has found out.

`hvd.init()` knows horovodrun, torchrun, mpirun, srun, jsrun and Kubernetes, so Lightning need not.
The Horovod strategies have one of their own. Another strategy can have it as a plugin: with
``Trainer(strategy="ddp", plugins=[HorovodEnvironment()])`` DDP finds its peers under horovodrun.
"""

from __future__ import annotations

import socket
from typing import Any

import horovod.torch as hvd
from horovod.common.addresses import LOOPBACK, routable_address
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.runtime import runtime
from horovod.lightning.flavours import Flavour


class Environment:
    """Rank, size, local and node rank from `hvd.init()`, under any launcher that it knows.

    `process_set`: act as if the job consisted of these ranks; one that is not among them is alone.
    """

    flavour: Flavour

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self._process_set = process_set
        self._meeting_point: tuple[str, int] | None = None

    @staticmethod
    def detect() -> bool:
        """Never by itself: it is there because Horovod was asked for."""
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
        """Horovod knows better."""

    def set_world_size(self, size: int) -> None:
        """Horovod knows better."""

    @property
    def main_address(self) -> str:
        return self._meet()[0]

    @property
    def main_port(self) -> int:
        return self._meet()[1]

    def _meet(self) -> tuple[str, int]:
        """Where rank 0 can be reached, for strategies that make connections of their own.

        Collective, the first time that somebody asks.
        """
        if self._meeting_point is None:
            hvd.init()
            mine: Any = None
            if hvd.rank() == 0:
                one_host = hvd.local_size() == hvd.size()
                address = LOOPBACK if one_host else routable_address(runtime.config.gloo_iface)
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    mine = (address, probe.getsockname()[1])
            self._meeting_point = hvd.broadcast_object(mine, 0, "lightning.meeting_point")
        return self._meeting_point

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """The strategies check these themselves: see `horovod.lightning.devices`."""

    def teardown(self) -> None:
        """The engine runs on: a program may fit several times, and has collectives of its own."""
