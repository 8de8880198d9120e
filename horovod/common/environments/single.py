"""No launcher: a job of one process."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod
from horovod.common.topology import Topology


class Single(Environment):
    """A job of one rank, which needs no variables."""

    name = "no launcher"
    rendezvous = RendezvousMethod.NOT_NEEDED

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        return True

    def claim(self) -> tuple[int, int]:
        return 0, 1

    def topology(self) -> Topology:
        return Topology()
