"""What `TorchState` needs of `horovod.torch`, without the rest of the binding.

Loading the whole binding for every simulated process would take longer than the job. `modules`
gives this module to whoever imports `horovod.torch.functions` or `horovod.torch.optimizers`.
"""

from __future__ import annotations

from typing import Any

from horovod.engine import objects
from horovod.engine.collective import WORLD


def broadcast_object(obj: Any, root_rank: int = 0, name: str = "object") -> Any:
    """Return the object of one rank on all ranks."""
    return objects.broadcast_object(obj, root_rank, name, WORLD)


def allgather_object(obj: Any, name: str = "object") -> list[Any]:
    """Return every rank's object."""
    return objects.allgather_object(obj, name, WORLD)


def broadcast_parameters(parameters: Any, root_rank: int) -> None:
    raise NotImplementedError("simulated states have no models")


def broadcast_optimizer_state(optimizer: Any, root_rank: int) -> None:
    raise NotImplementedError("simulated states have no optimizers")


def abandon() -> None:
    """Nothing is pending."""


class LocalStepsOptimizer:
    """A class of which there is no object."""
