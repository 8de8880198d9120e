"""Launchers of MPI jobs, which pass ranks in variables of their own."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod, Variables


class _MPILauncher(Environment):
    """A launcher whose ranks can also meet through MPI."""

    rendezvous = RendezvousMethod.MPI


class JSRun(_MPILauncher):
    """LSF's jsrun: JSM_NAMESPACE_RANK and JSM_NAMESPACE_SIZE."""

    name = "LSF jsrun"
    variables = Variables(
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
    )
    job_variables = ("LSB_JOBID", "JSM_NAMESPACE_ID", "PMIX_NAMESPACE")


class OpenMPI(_MPILauncher):
    """Open MPI's mpirun, and its descendants such as Spectrum MPI."""

    name = "Open MPI mpirun"
    variables = Variables(
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    job_variables = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


class MVAPICH2(_MPILauncher):
    """MVAPICH2's mpirun_rsh and mpiexec: MV2_COMM_WORLD_RANK and MV2_COMM_WORLD_SIZE."""

    name = "MVAPICH2 mpirun"
    variables = Variables(
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    )
    job_variables = ("MPISPAWN_MPIRUN_ID", "MPISPAWN_MPIRUN_HOST", "PMI_JOBID")


class Hydra(_MPILauncher):
    """Hydra, the mpirun of MPICH and Intel MPI, and other launchers that speak PMI.

    The local rank comes from Hydra (MPI_LOCALRANKID) or PALS.
    """

    name = "MPICH or Intel MPI mpirun"
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


class PMIx(_MPILauncher):
    """Launchers that speak PMIx only, such as prterun: PMIX_RANK, and a size from elsewhere.

    PMIx passes a process its rank in a variable, but a program would have to ask the PMIx server
    for the size. We take the size from other variables that such launchers set.
    """

    sizes = ("OMPI_COMM_WORLD_SIZE", "OMPI_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_ranks = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    local_sizes = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_WORLD_LOCAL_SIZE")

    name = "PMIx launcher"
    variables = Variables("PMIX_RANK", sizes[0], local_ranks[0], local_sizes[0])
    job_variables = ("PMIX_NAMESPACE",)

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        return bool(environ.get(cls.variables.rank))

    def claim(self) -> tuple[int, int]:
        return self._pair(self.variables.rank, self._first(self.sizes))

    def local(self) -> tuple[int, int]:
        if self.claim()[1] == 1:
            return 0, 1
        return self._pair(self._first(self.local_ranks), self._first(self.local_sizes))

    def _first(self, names: tuple[str, ...]) -> str:
        """Return the first of some variables that is set."""
        for name in names:
            if self.environ.get(name):
                return name
        raise self._error(f"set none of {', '.join(names)}", self.variables.rank, *names)
