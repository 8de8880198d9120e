"""One rank of benchmarks/elastic.py: trains the digits CNN until it is ended.

``python elastic_rank.py horovod|torchrun FOLDER``. Appends a line "time size" to FOLDER/<pid> for
every completed step. Under horovod the state is committed every 10 batches; under torchrun rank 0
writes a checkpoint as often, and all ranks read it when they start.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

COMMIT_EVERY = 10
BATCH = 32


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One rank's data, again and again."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        yield images[chosen], labels[chosen]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> None:  # type: ignore[type-arg]
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


class Journal:
    """What this process has done, for the benchmark to read while it runs."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / str(os.getpid()), "w", buffering=1)  # noqa: SIM115

    def note(self, size: int) -> None:
        self._file.write(f"{time.time():.6f} {size}\n")


def run_horovod(journal: Journal) -> None:
    import horovod.torch as hvd

    # All that needs no rank comes before init: a new worker does it while the others train.
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = batches(os.getpid())
    next(data)
    hvd.init()
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while True:
            one_step(model, optimizer, next(data))
            journal.note(hvd.size())
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(hvd.elastic.TorchState(model, optimizer, step=0))


def run_torchrun(journal: Journal, folder: Path) -> None:
    import torch.distributed as dist

    # Under a number of its own for each restart: in torch 2.13 Gloo otherwise finds the addresses
    # of the ranks before the restart, and gives up after 10 s of refused connections.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    store = dist.PrefixStore(attempt, dist.TCPStore(address, port, is_master=False))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    checkpoint, step = folder.with_suffix(".pt"), 0
    if checkpoint.exists():
        content = torch.load(checkpoint)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        step = content["step"]
    parallel = nn.parallel.DistributedDataParallel(model)
    for batch in batches(dist.get_rank()):
        one_step(parallel, optimizer, batch)
        journal.note(dist.get_world_size())
        step += 1
        if step % COMMIT_EVERY == 0 and dist.get_rank() == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**content, "step": step}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)


if __name__ == "__main__":
    contender, place = sys.argv[1], Path(sys.argv[2])
    if contender == "horovod":
        run_horovod(Journal(place))
    else:
        run_torchrun(Journal(place), place)
