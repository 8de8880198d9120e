"""One rank of benchmarks/lightning.py: a Trainer fits one model the way of one contender.

Started by `benchmarks.lightning` with a plan in JSON as the only argument. In the section "speed"
the one fit takes turns when it is told to; in "losses" it makes a number of steps.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.nn import functional as F

import horovod.lightning
from benchmarks.processes import Member
from benchmarks.training_models import WORKLOADS, Batch, Workload
from benchmarks.training_rank import RANK, SIZE, WARM_UP, batches

assert horovod.lightning, "imported because it registers the strategy"

# Where Lightning would look for a launcher it would start MPI, which disturbs what is measured.
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "auto", "devices": 1, "plugins": [LightningEnvironment()]},
    "ours": {"strategy": "horovod"},
    "ddp": {"strategy": "ddp", "devices": SIZE, "plugins": [LightningEnvironment()]},
}


class Endless:
    """The same few batches, again and again."""

    def __init__(self, data: list[Batch]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self._data)


class Module(pl.LightningModule):
    def __init__(self, workload: Workload, momentum: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = workload.model()
        self.momentum = momentum

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=self.momentum)


class Turns(pl.Callback):
    """Lets the fit go on for as many steps as a turn has, from the moment that is the order."""

    def __init__(self, member: Member, steps: int) -> None:
        self._member = member
        self._orders: Iterator[float] | None = None
        self._steps = steps
        self._left = WARM_UP
        self._start = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._left -= 1
        if self._left > 0:
            return
        if self._orders is None:
            gc.collect()
            gc.disable()
            self._orders = self._member.orders()
        else:
            self._member.answer(1000 * (time.monotonic() - self._start) / self._steps)
        order = next(self._orders, None)
        if order is None:
            trainer.should_stop = True
            return
        self._start, self._left = order, self._steps
        while time.monotonic() < self._start:
            pass


class Losses(pl.Callback):
    """What each step's loss was."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(outputs["loss"].item())


def main(plan: dict[str, Any]) -> None:
    member = Member()
    workload = WORKLOADS[plan["model"]]
    timed = plan["section"] == "speed"
    callback = Turns(member, workload.turn) if timed else Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        max_steps=-1 if timed else plan["steps"],
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **STRATEGIES[plan["contender"]],
    )
    module = Module(workload, momentum=0.9 if timed else 0.0)
    trainer.fit(module, Endless(batches(workload, torch.device("cpu"))))
    if isinstance(callback, Losses):
        Path(plan["result"]).with_suffix(f".{RANK}").write_text(json.dumps(callback.found))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main(json.loads(sys.argv[1]))
