"""What a Trainer has to carry over when ranks are lost or come: `TrainerState`.

A commit is a checkpoint of Lightning's that stays in memory, and where the samples of the epoch are
that were not seen yet. A new fit loads it as it would load a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod.common.elastic import State
from horovod.engine.runtime import runtime
from horovod.lightning.elastic.sampler import EpochSampler
from horovod.torch.elastic.snapshot import Snapshots, clone
from horovod.torch.functions import broadcast_object

SAMPLERS = "horovod_samplers"
AT_EPOCH_START = "horovod_at_epoch_start"


class InMemory(str):
    """Stands for the path of a checkpoint, in Lightning's messages too."""

    content: Callable[[], dict[str, Any]]


class TrainerState(State):
    """The state of a fit: `module`, and all that the Trainer knows about its training."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(broadcast_object, lambda: runtime.topology.rank)
        self.module = module
        self._initial = clone(module.state_dict())
        self._snapshots = Snapshots()
        self._trainer: Any = None  # while it trains
        self._num_given = 0  # samplers that have got what was committed for them
        self._epoch_start = False  # what is committed next

    @property
    def checkpoint(self) -> InMemory | None:
        """The last commit, for ``Trainer.fit(ckpt_path=...)``; None if there is none yet."""
        if self._snapshots.current is None:
            return None
        made = InMemory("the last commit, in memory")
        made.content = self._content
        return made

    def _content(self) -> dict[str, Any]:
        """A copy: optimizers keep the tensors that they load."""
        assert self._snapshots.current is not None, "asked for through `checkpoint`"
        content: dict[str, Any] = clone(self._snapshots.current.content)
        return content

    @property
    def resumes_epoch_start(self) -> bool:
        """Whether the last commit was made before an epoch's first batch."""
        current = self._snapshots.current
        return current is not None and bool(current.content[AT_EPOCH_START])

    # -- with a Trainer --------------------------------------------------------------------

    def attach(self, trainer: Any) -> None:
        """The `trainer` is about to fit."""
        self._trainer = trainer
        self._num_given = 0

    def detach(self) -> None:
        """The Trainer has finished: nothing newer than the last commit is to be had."""
        self._trainer = None

    @property
    def samplers(self) -> list[EpochSampler]:
        """Those of the training data that can go on in the middle of an epoch."""
        loaders = getattr(self._trainer.fit_loop._combined_loader, "flattened", [])
        found = [getattr(loader, "sampler", None) for loader in loaders]
        return [sampler for sampler in found if isinstance(sampler, EpochSampler)]

    def sampler_for(self, dataset: Any, shuffle: bool, seed: int, batch_size: int) -> EpochSampler:
        """A sampler of the training data `dataset`, which goes on where the last commit was.

        `shuffle`, `seed` and `batch_size` are those of the data loader.
        """
        made = EpochSampler(dataset, shuffle, seed, batch_size)
        current = self._snapshots.current
        committed = [] if current is None else current.content[SAMPLERS]
        if self._num_given < len(committed):
            made.load_state_dict(committed[self._num_given])
            self._num_given += 1
        return made

    def commit_at(self, epoch_start: bool) -> None:
        """Commit; `epoch_start`: nothing of the epoch is done yet."""
        self._epoch_start = epoch_start
        self.commit()

    # -- as the elastic loop asks for it ---------------------------------------------------

    def save(self) -> None:
        """Take a snapshot. Outside of a fit there is nothing newer than the last one."""
        if self._trainer is None:
            return
        content = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        content[SAMPLERS] = [sampler.state_dict() for sampler in self.samplers]
        content[AT_EPOCH_START] = self._epoch_start
        if self._epoch_start:
            _as_if_between_epochs(content["loops"]["fit_loop"])
        self._snapshots.take(content)

    def restore(self) -> None:
        """The next fit loads the last commit by itself."""
        self.detach()
        if self._snapshots.current is None:
            self.module.load_state_dict(self._initial)

    def sync(self) -> None:
        self.detach()
        current = self._snapshots.current
        mine = None if current is None else current.content
        content = broadcast_object(mine, self._root, "elastic.trainer")
        if content is not None and runtime.topology.rank != self._root:
            self._snapshots.take(content)


def _as_if_between_epochs(fit_loop: dict[str, Any]) -> None:
    """Make the counts of a loop that has just begun an epoch those of one that is about to."""
    epochs = fit_loop["epoch_progress"]
    for counts in (epochs["total"], epochs["current"]):
        counts["ready"] = counts["completed"]
