"""One rank of benchmarks/elastic.py: trains the digits CNN until it is ended.

``python elastic_rank.py horovod|torchrun FOLDER [cuda [shared]]``. Notes every completed step in
FOLDER (`benchmarks.elastic_journals`). Under horovod the state is committed every 10 batches; under
torchrun rank 0 writes a checkpoint as often, and all ranks read it when they start. On cuda, for
horovod alone, the pictures are made up; ranks that have a GPU `shared` each pose as NCCL's only one
on a host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.elastic_journals import Journal
from benchmarks.gpus import own_nccl_host

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


def load() -> tuple[Tensor, Tensor]:
    """The digits of scikit-learn: pictures and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(digits.target)


def make_up() -> tuple[Tensor, Tensor]:
    """The same shapes without scikit-learn, which machines with a GPU need not have.

    Each picture is the one of its label, beneath noise, so that it can be learned.
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1797,), generator=generator)
    originals = torch.rand(10, 1, 8, 8, generator=generator)
    noise = torch.rand(len(labels), 1, 8, 8, generator=generator)
    return (originals[labels] + noise) / 2, labels


def batches(data: tuple[Tensor, Tensor], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One rank's data, again and again."""
    images, labels = data
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        yield images[chosen], labels[chosen]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> None:  # type: ignore[type-arg]
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def warm_up(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Make a context on the GPU and load what a step needs there."""
    images, labels = (part.to("cuda") for part in batch)
    F.cross_entropy(model(images), labels).backward()
    torch.cuda.synchronize()


def run_horovod(journal: Journal, on_cuda: bool) -> None:
    import horovod.torch as hvd

    # All that needs no rank comes before init: a new worker does it while the others train.
    model = make_model()
    data = batches(make_up() if on_cuda else load(), os.getpid())
    next(data)
    device = torch.device("cpu")
    if on_cuda and torch.cuda.device_count() == 1:  # otherwise its local rank says which
        warm_up(model.to("cuda"), next(data))
    hvd.init()
    if on_cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        model.to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    attempt = 0

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        nonlocal attempt
        attempt += 1
        while True:
            images, labels = next(data)
            one_step(model, optimizer, (images.to(device), labels.to(device)))
            if on_cuda:
                torch.cuda.synchronize(device)  # a step that is only queued is not completed
            journal.note(hvd.size(), attempt)
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
    for batch in batches(load(), dist.get_rank()):
        one_step(parallel, optimizer, batch)
        journal.note(dist.get_world_size())
        step += 1
        if step % COMMIT_EVERY == 0 and dist.get_rank() == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**content, "step": step}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)


if __name__ == "__main__":
    contender, place, *device_words = sys.argv[1:]
    if "shared" in device_words:
        os.environ.update(own_nccl_host(f"worker{os.getpid()}"))
    if contender == "horovod":
        run_horovod(Journal(Path(place)), "cuda" in device_words)
    else:
        run_torchrun(Journal(Path(place)), Path(place))
