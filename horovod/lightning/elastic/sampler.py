"""Which samples of an epoch are left: an ElasticSampler that counts like a Trainer.

A Trainer that is restored in the middle of an epoch goes on with the number of batches that it has
counted, up to the length of its loader. So the length of this sampler is what was done before the
ranks changed, in batches of this rank, and what is left to do; only the latter is handed out.
"""

from __future__ import annotations

from typing import Any

from horovod.torch.elastic.sampler import ElasticSampler


class EpochSampler(ElasticSampler):
    """Used by the strategy in place of Lightning's DistributedSampler, for training data."""

    def __init__(self, dataset: Any, shuffle: bool, seed: int, batch_size: int) -> None:
        self.batches = 0  # of each rank, in this epoch
        self._before = 0  # of those, when what is left was last divided
        self._batch_size = batch_size
        super().__init__(dataset, shuffle, seed)

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the beginning of an epoch, also of one that goes on."""
        if epoch != self.epoch:
            self.batches = 0
            super().set_epoch(epoch)

    @property
    def resumed(self) -> bool:
        """Whether this epoch goes on after others had begun it."""
        return self._before > 0

    def record(self) -> None:
        """All ranks have trained on one more batch."""
        self.record_batch(self.batches, self._batch_size)
        self.batches += 1

    def reset(self) -> None:
        super().reset()
        self._before = self.batches

    def __len__(self) -> int:
        return self._before * self._batch_size + self.num_samples

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]
        super().load_state_dict(state_dict)
