"""Models that all ranks train on their devices, beside what one process makes of all their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import nn

import horovod.torch as hvd
from tests.accelerators import own_device
from tests.gpu import LIMIT
from tests.torch.training import ROWS, batch_of, loss_of, make_model

Tensor = torch.Tensor
Make = Callable[[Any], torch.optim.Optimizer]

TIGHT = {"rtol": 1e-4, "atol": 1e-5}
WIDE = {"rtol": 5e-2, "atol": 5e-2}  # of half precision


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def precise() -> torch.device:
    """This rank's device, on which float32 keeps its digits and a program gives the same bits."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    return own_device()


def weights_of(model: nn.Module) -> list[Tensor]:
    """Copies in host memory, for the test process."""
    return [param.detach().cpu().clone() for param in model.parameters()]


class Twins:
    """A model that all ranks train together, and one that this rank trains with all the data.

    `together` belongs to `optimizer`, which is distributed, and `alone` to `base`.
    """

    def __init__(
        self,
        model: str | Callable[[], nn.Module] = "mlp",
        make: Make = sgd,
        **options: Any,
    ) -> None:
        self.device = precise()
        made = [make_model(model) if isinstance(model, str) else _seeded(model) for _ in range(2)]
        self.together, self.alone = (each.to(self.device) for each in made)
        self.base = make(self.alone.parameters())
        self.optimizer: Any = hvd.DistributedOptimizer(
            make(self.together.parameters()), self.together.named_parameters(), **options
        )

    def batch(self, number: int) -> Tensor:
        """Everybody's rows."""
        return batch_of(number, hvd.size()).to(self.device)

    def rows(self, number: int, rank: int | None = None) -> Tensor:
        """The rows of a rank, by default of this one."""
        rank = hvd.rank() if rank is None else rank
        return self.batch(number)[rank * ROWS : (rank + 1) * ROWS]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.base.zero_grad(set_to_none=set_to_none)

    def backward(self, number: int) -> None:
        loss_of(self.together, self.rows(number)).backward()
        loss_of(self.alone, self.batch(number)).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.base.step()

    def train(self, numbers: Sequence[int], set_to_none: bool = True) -> None:
        for number in numbers:
            self.zero_grad(set_to_none)
            self.backward(number)
            self.step()

    def results(self) -> tuple[list[Tensor], list[Tensor]]:
        """For `assert_alike`."""
        return weights_of(self.together), weights_of(self.alone)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def assert_alike(results: list[Any], **tolerance: float) -> None:
    """All ranks have the same bits, and about those of one process."""
    for together, alone in results:
        for mine, theirs, expected in zip(together, results[0][0], alone, strict=True):
            assert torch.equal(mine, theirs), "ranks differ"
            torch.testing.assert_close(mine, expected, **(tolerance or TIGHT))


def assert_same(results: list[list[Tensor]]) -> None:
    """All ranks have the same bits, and they are numbers."""
    for found in results:
        for mine, theirs in zip(found, results[0], strict=True):
            assert torch.equal(mine, theirs), "ranks differ"
            assert bool(mine.isfinite().all())


@contextmanager
def default_group() -> Iterator[None]:
    """The default process group of torch.distributed, beside Horovod, on all ranks."""
    device, rank, size = own_device(), hvd.rank(), hvd.size()
    here, limit = "127.0.0.1", timedelta(seconds=LIMIT)
    if rank == 0:
        store = torch.distributed.TCPStore(here, 0, size, True, limit, wait_for_workers=False)
        hvd.broadcast_object(store.port)
    else:
        port = hvd.broadcast_object(None)
        store = torch.distributed.TCPStore(here, port, size, False, limit, wait_for_workers=False)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=limit
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
    hvd.barrier()  # rank 0 serves the store
