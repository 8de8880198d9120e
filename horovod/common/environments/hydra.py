"""Hydra, the mpirun of MPICH and Intel MPI, and other launchers that speak PMI."""

from __future__ import annotations

from horovod.common.environments.base import Environment, RendezvousMethod, Variables


class Hydra(Environment):
    """PMI_RANK and PMI_SIZE; the local rank comes from Hydra (MPI_LOCALRANKID) or PALS."""

    name = "MPICH or Intel MPI mpirun"
    rendezvous = RendezvousMethod.MPI
    variables = Variables(
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    )
    job_variables = ("PMI_JOBID", "PALS_APID")

    def local(self) -> tuple[int, int]:
        pals = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
        if not self.environ.get(self.variables.local_rank) and self.environ.get(pals[0]):
            return self._pair(*pals)
        return super().local()
