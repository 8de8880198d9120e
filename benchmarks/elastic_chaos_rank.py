"""One rank of benchmarks/elastic_chaos.py: trains until told to stop, keeping account of samples.

``python elastic_chaos_rank.py FOLDER [cuda [shared]]``. On cuda the pictures are made up; ranks
that have a GPU `shared` each pose as NCCL's only one on a host.

Which samples an epoch has seen is part of the committed state, as a count for each: so what a
rollback forgets is forgotten there too, and what is missing at the end of an epoch is missing.

A fault may be ordered for the moment when this rank takes its next step, commits, meets the others
or gives them its state: it then inflicts it on itself. SIGUSR1 makes it hold the interpreter's lock
wherever it is.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd
from benchmarks.elastic_rank import load, make_model, make_up
from benchmarks.gpus import own_nccl_host
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry
from horovod.transport import select

FOLDER, DEVICE_WORDS = Path(sys.argv[1]), sys.argv[2:]
ORDER = FOLDER / f"order.{os.getpid()}"
HOLD_SECONDS = 10
SLOW_SECONDS = 6
MORE_EPOCHS = 8  # after the last fault, so that accuracy shows what training gives


def pass_through(moment: str) -> None:
    """Carry out what was ordered for this moment."""
    if not ORDER.exists():
        return
    when, what = json.loads(ORDER.read_text())
    if when != moment:
        return
    ORDER.unlink()
    if what == "exception":
        raise RuntimeError("the exception that chaos asked for")
    if what == "exit 0":
        sys.exit(0)
    if what == "hold":
        hold()
    elif what == "slow":
        time.sleep(SLOW_SECONDS)
    else:
        os.kill(os.getpid(), getattr(signal, what))


def hold(*_: object) -> None:
    """No thread of this process runs any Python meanwhile."""
    left = HOLD_SECONDS
    while left:
        left = ctypes.PyDLL(None).sleep(left)  # a signal may end it early


class Witness:
    """A value of the state, to be there in the middle of a commit and of a synchronisation."""


class WitnessHandler(StateHandler):
    def save(self) -> None:
        pass_through("commit")

    def restore(self) -> None:
        pass

    def sync(self) -> None:
        pass_through("sync")


def be_present() -> None:
    """Also where there is no public way to be: when ranks have met and make their connections."""
    connect = select.for_host_memory

    def connect_later(*args: Any) -> Any:
        pass_through("rendezvous")
        return connect(*args)

    select.for_host_memory = connect_later
    set_handler_registry([*get_handler_registry(), (Witness, WitnessHandler)])
    signal.signal(signal.SIGUSR1, hold)


def own_device() -> torch.device:
    """Return the device of this rank, which becomes the current one."""
    if "cuda" not in DEVICE_WORDS:
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main() -> None:
    be_present()
    if "shared" in DEVICE_WORDS:
        os.environ.update(own_nccl_host(f"worker{os.getpid()}"))
    images, labels = make_up() if "cuda" in DEVICE_WORDS else load()
    data = TensorDataset(images, labels, torch.arange(len(images)))
    hvd.init()
    device = own_device()
    sampler = hvd.elastic.ElasticSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = make_model().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.left != 0:
            for batch, (images, labels, numbers) in enumerate(loader):
                pass_through("training")
                optimizer.zero_grad()
                F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
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
        witness=Witness(),
        sampler=sampler,
        epoch=0,
        left=-1,
        seen=torch.zeros(len(data), dtype=torch.int64),
        missing={},
    )
    train(state)
    model.eval()
    model.cpu()
    with torch.no_grad():
        right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    end = {"digest": digest.hexdigest(), "accuracy": float(right), "missing": state.missing}
    (FOLDER / f"end.{os.getpid()}").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
