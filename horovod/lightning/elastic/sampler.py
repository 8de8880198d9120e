"""An ElasticSampler that counts batches as a Trainer does.

A Trainer that is restored in the middle of an epoch continues with the number of batches that it
has counted, up to the length of its loader. So the length of this sampler is the number of samples
done before the ranks changed, in batches of this rank, plus those that are left; it hands out only
the latter.
"""

from __future__ import annotations

from typing import Any

from horovod.torch.elastic.sampler import ElasticSampler


class EpochSampler(ElasticSampler):
    """Replaces Lightning's DistributedSampler for training data."""

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
