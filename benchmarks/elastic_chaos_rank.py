"""One rank of benchmarks/elastic_chaos.py: trains until told to stop, keeping account of samples.

Which samples an epoch has seen is part of the committed state, as a count for each: so what a
rollback forgets is forgotten there too, and what is missing at the end of an epoch is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd
from benchmarks.elastic_rank import make_model

FOLDER = Path(sys.argv[1])
MORE_EPOCHS = 8  # after the last fault, so that accuracy shows what training gives


def load() -> TensorDataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(images, torch.tensor(digits.target), torch.arange(len(images)))


def main() -> None:
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    data = load()
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.left != 0:
            for batch, (images, labels, numbers) in enumerate(loader):
                if asked:
                    raise RuntimeError("the exception that chaos asked for")
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                state.sampler.record_batch(batch, len(labels))
                state.seen = state.seen + torch.bincount(
                    hvd.allgather(numbers, name="numbers"), minlength=len(data)
                )
                if (batch + 1) % 10 == 0:
                    state.commit()
            missing = int((state.seen == 0).sum())
            state.missing = {**state.missing, str(state.epoch): missing}
            state.epoch += 1
            stop = torch.tensor([int((FOLDER / "stop").exists())])
            stop = hvd.allreduce(stop, op=hvd.Max, name="stop")
            if state.left > 0:
                state.left -= 1
            elif int(stop):
                state.left = MORE_EPOCHS
            state.seen = torch.zeros(len(data), dtype=torch.int64)
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        epoch=0,
        left=-1,
        seen=torch.zeros(len(data), dtype=torch.int64),
        missing={},
    )
    train(state)
    model.eval()
    with torch.no_grad():
        right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    end = {"digest": digest.hexdigest(), "accuracy": float(right), "missing": state.missing}
    (FOLDER / f"end.{os.getpid()}").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
