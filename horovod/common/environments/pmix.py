"""Launchers that speak PMIx only, such as prterun.

PMIx passes a process its rank in a variable, but a program would have to ask the PMIx server for
the size. We take the size from other variables that such launchers set.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod, Variables

_SIZES = ("OMPI_COMM_WORLD_SIZE", "OMPI_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_WORLD_LOCAL_SIZE")


class PMIx(Environment):
    """PMIX_RANK, and a size from one of several variables."""

    name = "PMIx launcher"
    rendezvous = RendezvousMethod.MPI
    variables = Variables(
        rank="PMIX_RANK", size=_SIZES[0], local_rank=_LOCAL_RANKS[0], local_size=_LOCAL_SIZES[0]
    )
    job_variables = ("PMIX_NAMESPACE",)

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        return bool(environ.get(cls.variables.rank))

    def claim(self) -> tuple[int, int]:
        return self._pair(self.variables.rank, self._first(_SIZES))

    def local(self) -> tuple[int, int]:
        if self.claim()[1] == 1:
            return 0, 1
        return self._pair(self._first(_LOCAL_RANKS), self._first(_LOCAL_SIZES))

    def _first(self, names: tuple[str, ...]) -> str:
        """Return the first of some variables that is set."""
        for name in names:
            if self.environ.get(name):
                return name
        raise self._error(f"set none of {', '.join(names)}", self.variables.rank, *names)
