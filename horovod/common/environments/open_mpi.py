"""Open MPI's mpirun, and its descendants such as Spectrum MPI."""

from __future__ import annotations

from horovod.common.environments.base import Environment, RendezvousMethod, Variables


class OpenMPI(Environment):
    """OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE."""

    name = "Open MPI mpirun"
    rendezvous = RendezvousMethod.MPI
    variables = Variables(
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    job_variables = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
