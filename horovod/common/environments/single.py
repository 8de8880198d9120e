"""No launcher: a job of one process."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod
from horovod.common.topology import Topology


class Single(Environment):
    name = "no launcher"
    meeting = RendezvousMethod.ALONE

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        return True

    def claim(self) -> tuple[int, int]:
        return 0, 1

    def topology(self) -> Topology:
        return Topology()
