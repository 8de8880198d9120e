"""LSF's jsrun."""

from __future__ import annotations

from horovod.common.environments.base import Environment, RendezvousMethod, Variables


class JSRun(Environment):
    """JSM_NAMESPACE_RANK and JSM_NAMESPACE_SIZE."""

    name = "LSF jsrun"
    rendezvous = RendezvousMethod.MPI
    variables = Variables(
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
    )
    job_variables = ("LSB_JOBID", "JSM_NAMESPACE_ID", "PMIX_NAMESPACE")
