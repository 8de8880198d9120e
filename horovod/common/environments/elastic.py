"""A worker of an elastic job: the driver decides about its rank, which may change at any time."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod
from horovod.common.generations.generation import Generation
from horovod.common.generations.membership import is_elastic, membership
from horovod.common.topology import Topology


class Elastic(Environment):
    """horovodrun with --min-np or a discovery script: HOROVOD_ELASTIC and HOROVOD_WORKER_ID.

    The ranks come from the decision that the engine entered last
    (`horovod.common.generations.membership`).
    """

    name = "horovodrun (elastic)"
    rendezvous = RendezvousMethod.LAUNCHER_STORE

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        return is_elastic(environ)

    def generation(self) -> Generation:
        """Return the generation that this process has entered; raise ValueError if none."""
        member = membership(self.environ)
        if member is None or member.generation is None:
            raise ValueError("a worker of an elastic job has no place before it calls init()")
        return member.generation

    def claim(self) -> tuple[int, int]:
        topology = self.topology()
        return topology.rank, topology.size

    def cross(self) -> tuple[int, int]:
        topology = self.topology()
        return topology.cross_rank, topology.cross_size

    def topology(self) -> Topology:
        return self.generation().topology
