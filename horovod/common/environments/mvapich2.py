"""MVAPICH2's mpirun_rsh and mpiexec."""

from __future__ import annotations

from horovod.common.environments.base import Environment, RendezvousMethod, Variables


class MVAPICH2(Environment):
    """MV2_COMM_WORLD_RANK and MV2_COMM_WORLD_SIZE."""

    name = "MVAPICH2 mpirun"
    rendezvous = RendezvousMethod.MPI
    variables = Variables(
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    )
    job_variables = ("MPISPAWN_MPIRUN_ID", "MPISPAWN_MPIRUN_HOST", "PMI_JOBID")
