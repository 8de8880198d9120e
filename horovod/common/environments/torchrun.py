"""torchrun, and launchers that set its variables."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod, Variables


class TorchRun(Environment):
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""

    name = "torchrun"
    rendezvous = RendezvousMethod.TORCH_STORE
    variables = Variables(
        rank="RANK", size="WORLD_SIZE", local_rank="LOCAL_RANK", local_size="LOCAL_WORLD_SIZE"
    )
    # With the restart count, because a store that outlives restarts may still have old values.
    job_variables = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        return super().detects(environ) and bool(environ.get("LOCAL_RANK"))

    def cross(self) -> tuple[int, int] | None:
        if not self.environ.get("GROUP_RANK") or not self.environ.get("GROUP_WORLD_SIZE"):
            return None
        cross_rank, cross_size = self._pair("GROUP_RANK", "GROUP_WORLD_SIZE")
        homogeneous = cross_size * self.local()[1] == self.claim()[1]
        return (cross_rank, cross_size) if homogeneous else None


class Kubeflow(Environment):
    """Kubeflow's PyTorchJob, one process per pod: RANK and WORLD_SIZE, without LOCAL_RANK."""

    name = "Kubeflow PyTorchJob"
    rendezvous = RendezvousMethod.TORCH_STORE
    variables = Variables(rank="RANK", size="WORLD_SIZE", local_rank="", local_size="")

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        return super().detects(environ) and not environ.get("LOCAL_RANK")

    def local(self) -> tuple[int, int]:
        return 0, 1
