"""ElasticSampler: goes on with the rest of an epoch after the ranks have changed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch.utils.data

from horovod.engine.runtime import runtime


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the samples of an epoch that are not processed yet among the ranks.

    Tell it with `record_batch` what has been processed, make it an attribute of the `TorchState`,
    and call `set_epoch` at the *end* of an epoch. All samples come in one order that every rank
    knows, dealt out in turn; so while all ranks process batches of the same size, what they have
    processed is the beginning of that order, and a number describes it.

    Every sample of an epoch is processed at least once. Without failures, even if ranks come and
    go at commits, it is exactly once, except that every division repeats up to ``size - 1``
    samples to give all ranks equally many. After a failure, what was recorded since the last
    commit is processed again.

    Args:
        dataset: Anything with a length.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of that order; the same on all ranks.

    Examples:
        >>> sampler = hvd.elastic.ElasticSampler(dataset)
        >>> state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of the epoch's order, by all ranks
        self.processed_indices: set[int] = set()  # beyond that: see record_indices
        self.rank = 0
        self.num_replicas = 1
        self.remaining_indices: list[int] = []  # those left when the ranks last changed
        self.num_samples = 0  # for each rank, since then
        self.total_size = 0
        self._positions: list[int] | None = None  # positions of those left, if there are gaps
        self._recorded = 0  # how many of those left are processed now
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number `epoch`, with nothing processed.

        Call this at the end of an epoch: at the beginning it would undo what was restored.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed its batch `batch_idx`, of `batch_size` samples."""
        self._record(batch_size * self.num_replicas)

    def _record(self, count: int) -> None:
        """Note that the ranks have processed `count` more samples together."""
        self._recorded += count
        if self._positions is None:
            self.processed_num += count
        elif self._recorded >= len(self._positions):
            self.processed_num = len(self.dataset)
        elif self._recorded:
            self.processed_num = self._positions[self._recorded - 1] + 1

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has processed `indices`; for ranks that process different numbers.

        The other ranks learn of it when the ranks change at a commit. When a rank fails, only the
        samples of rank 0 are known, and the others' are processed again: prefer `record_batch`.
        """
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch number `batch_idx`, of `batch_size` samples.

        The numbers of batches begin at 0 whenever the ranks change.
        """
        return self._own()[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and which of its samples are processed."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, which an `ElasticSampler` of the same data returned."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the ranks that are there now."""
        self.rank, self.num_replicas = self._place()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        done = min(self.processed_num, len(order))
        self.remaining_indices, self._positions = order[done:], None
        if self.processed_indices:
            left = [
                (position, index)
                for position, index in enumerate(order)
                if position >= done and index not in self.processed_indices
            ]
            self._positions = [position for position, _ in left]
            self.remaining_indices = [index for _, index in left]
        self._recorded = 0
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _place(self) -> tuple[int, int]:
        return runtime.topology.rank, runtime.topology.size

    def _own(self) -> list[int]:
        remaining, count = self.remaining_indices, len(self.remaining_indices)
        positions = range(self.rank, self.total_size, self.num_replicas)
        return [remaining[place % count] for place in positions]

    def __iter__(self) -> Iterator[int]:
        return _SampleIterator(self)

    def __len__(self) -> int:
        return self.num_samples


class _SampleIterator(Iterator[int]):
    """This rank's samples, and how many of them have been drawn.

    torchdata's StatefulDataLoader saves that, and so finds its position again, whether
    or not the script has recorded its batches, and with any number of ranks.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self._before = self._sampler.state_dict()
        self._own, self._num_replicas = self._sampler._own(), self._sampler.num_replicas
        self._num_drawn = 0  # by this rank

    def __next__(self) -> int:
        if self._num_drawn == len(self._own):
            raise StopIteration
        self._num_drawn += 1
        return self._own[self._num_drawn - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return what was processed when the iterator was made, and how many all drew since."""
        num_drawn = self._num_drawn * self._num_replicas
        return {"before": self._before, "num_drawn": num_drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after those samples, of which all ranks have drawn equally many."""
        self._sampler.load_state_dict(state_dict["before"])
        self._sampler._record(state_dict["num_drawn"])
        self._sampler.reset()
        self._begin()
