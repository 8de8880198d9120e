"""horovodrun, and any other launcher or person that sets HOROVOD_RANK and HOROVOD_SIZE."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod, Variables

CROSS_RANK = "HOROVOD_CROSS_RANK"
CROSS_SIZE = "HOROVOD_CROSS_SIZE"


class HorovodRun(Environment):
    """Explicit variables, which win over all others. Without local ones, a host has one rank."""

    name = "HOROVOD_* (horovodrun)"
    rendezvous = RendezvousMethod.LAUNCHER_STORE
    variables = Variables(
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
    )
    job_variables = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        names = cls.variables
        ours = (names.rank, names.size, names.local_rank, names.local_size, CROSS_RANK, CROSS_SIZE)
        return any(environ.get(name) for name in ours)

    def local(self) -> tuple[int, int]:
        names = self.variables
        if not self.environ.get(names.local_rank) and not self.environ.get(names.local_size):
            return 0, 1
        return super().local()

    def cross(self) -> tuple[int, int] | None:
        if not self.environ.get(CROSS_RANK) and not self.environ.get(CROSS_SIZE):
            return None
        return self._pair(CROSS_RANK, CROSS_SIZE)
