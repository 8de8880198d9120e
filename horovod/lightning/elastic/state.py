"""`TrainerState`: what a Trainer carries over when ranks are lost or added.

A commit is a checkpoint of Lightning that stays in memory, together with the samplers' record of
the samples that no rank has seen yet. A new fit loads it as it would load a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod.common.elastic import State
from horovod.engine.runtime import runtime
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.snapshot import Snapshots, clone
from horovod.torch.functions import broadcast_object

SAMPLERS = "horovod_samplers"
AT_EPOCH_START = "horovod_at_epoch_start"


class EpochSampler(ElasticSampler):
    """Replaces Lightning's DistributedSampler for training data, and counts batches as a Trainer.

    A Trainer that is restored in the middle of an epoch continues with the number of batches that
    it has counted, up to the length of its loader. So the length of this sampler is the number of
    samples done before the ranks changed, in batches of this rank, plus those that are left; it
    hands out only the latter.
    """

    def __init__(self, dataset: Any, shuffle: bool, seed: int, batch_size: int) -> None:
        self.batches = 0  # the number of batches that each rank has done in this epoch
        self._batches_before = 0  # batches that were done when the rest was last divided
        self._batch_size = batch_size
        super().__init__(dataset, shuffle, seed)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; Lightning also calls this when it resumes one, which keeps its counts."""
        if epoch != self.epoch:
            self.batches = 0
            super().set_epoch(epoch)

    @property
    def is_resumed(self) -> bool:
        """Whether this epoch was begun before the ranks last changed."""
        return self._batches_before > 0

    def record(self) -> None:
        """Count one more batch that all ranks have trained on."""
        self.record_batch(self.batches, self._batch_size)
        self.batches += 1

    def reset(self) -> None:
        super().reset()
        self._batches_before = self.batches

    def __len__(self) -> int:
        return self._batches_before * self._batch_size + self.num_samples

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]
        super().load_state_dict(state_dict)


class InMemoryCheckpoint(str):
    """Stands for the path of a checkpoint; Lightning's messages show its text."""

    content: Callable[[], dict[str, Any]]


class TrainerState(State):
    """The state of a fit: a module, and all that the Trainer knows about its training.

    Args:
        module: The LightningModule to train.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(broadcast_object, lambda: runtime.topology.rank)
        self.module = module
        self._initial = clone(module.state_dict())
        self._snapshots = Snapshots()
        self._trainer: Any = None  # only while it trains
        self._num_restored = 0  # the number of samplers that were made with committed state
        self._is_epoch_start = False  # whether the next commit is before an epoch's first batch

    @property
    def checkpoint(self) -> InMemoryCheckpoint | None:
        """The last commit, for ``Trainer.fit(ckpt_path=...)``; None if there is none yet."""
        if self._snapshots.current is None:
            return None
        checkpoint = InMemoryCheckpoint("the last commit, in memory")
        checkpoint.content = self._copy_content
        return checkpoint

    def _copy_content(self) -> dict[str, Any]:
        """Return a copy of the last commit, since optimizers keep the tensors that they load."""
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
        """Take snapshots of `trainer` from now on; it is about to fit."""
        self._trainer = trainer
        self._num_restored = 0

    def detach(self) -> None:
        """Take no more snapshots: the Trainer has finished."""
        self._trainer = None

    @property
    def samplers(self) -> list[EpochSampler]:
        """The samplers of the training data that can resume in the middle of an epoch."""
        loaders = getattr(self._trainer.fit_loop._combined_loader, "flattened", [])
        samplers = [getattr(loader, "sampler", None) for loader in loaders]
        return [sampler for sampler in samplers if isinstance(sampler, EpochSampler)]

    def sampler_for(self, dataset: Any, shuffle: bool, seed: int, batch_size: int) -> EpochSampler:
        """Make a sampler of training data that continues where the last commit was made.

        Args:
            dataset: The data to sample.
            shuffle: Whether the data loader shuffles.
            seed: The seed of its shuffling.
            batch_size: The number of samples in its batches.

        Returns:
            The sampler.
        """
        sampler = EpochSampler(dataset, shuffle, seed, batch_size)
        current = self._snapshots.current
        committed = [] if current is None else current.content[SAMPLERS]
        if self._num_restored < len(committed):
            sampler.load_state_dict(committed[self._num_restored])
            self._num_restored += 1
        return sampler

    def commit_at(self, epoch_start: bool) -> None:
        """Commit the state; `epoch_start` says whether no batch of the epoch is done yet."""
        self._is_epoch_start = epoch_start
        self.commit()

    # -- called by the elastic loop --------------------------------------------------------

    def save(self) -> None:
        """Take a snapshot. Outside of a fit nothing is newer than the last snapshot."""
        if self._trainer is None:
            return
        content = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        content[SAMPLERS] = [sampler.state_dict() for sampler in self.samplers]
        content[AT_EPOCH_START] = self._is_epoch_start
        if self._is_epoch_start:
            _rewind_to_epoch_start(content["loops"]["fit_loop"])
        self._snapshots.take(content)

    def restore(self) -> None:
        """Return to the initial values if nothing was committed; the next fit loads a commit."""
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


def _rewind_to_epoch_start(fit_loop: dict[str, Any]) -> None:
    """Change the counts of a loop that has just begun an epoch to those of just before it."""
    epochs = fit_loop["epoch_progress"]
    for counts in (epochs["total"], epochs["current"]):
        counts["ready"] = counts["completed"]
