"""Kubeflow's PyTorchJob: torchrun's variables without the local ones, one process per pod."""

from __future__ import annotations

from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod, Variables


class Kubeflow(Environment):
    """RANK and WORLD_SIZE, without LOCAL_RANK."""

    name = "Kubeflow PyTorchJob"
    rendezvous = RendezvousMethod.TORCH_STORE
    variables = Variables(rank="RANK", size="WORLD_SIZE", local_rank="", local_size="")

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        return super().detects(environ) and not environ.get("LOCAL_RANK")

    def local(self) -> tuple[int, int]:
        return 0, 1
