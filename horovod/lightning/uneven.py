"""Handles ranks with different numbers of training batches: by an error, or by `hvd.join()`.

All ranks reduce gradients together, so a rank with fewer batches would leave the others waiting. By
default this is an error before training starts. With ``HorovodStrategy(join=True)`` such a rank
waits in `hvd.join()` at the end of its epoch and adds zeros to the others' averages. Afterwards it
takes over the parameters, optimizer state, schedulers and step counts of the last rank to join.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import horovod.torch as hvd
from horovod.lightning.flavours import join_with_base


def watch_batches(strategy: Any, trainer: Any) -> Any:
    """Insert a `BatchWatcher` before all other callbacks; its `stop` removes it."""
    if strategy.world_size == 1:
        return None
    base = strategy.flavour.trainer_part("callbacks").Callback
    watcher_class = join_with_base("BatchWatcher", BatchWatcher, base, strategy.flavour)
    watcher = watcher_class(strategy, trainer)
    trainer.callbacks.insert(0, watcher)
    return watcher


class BatchWatcher:
    """Compares the ranks' numbers of batches when an epoch starts, and joins when it ends."""

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer

    def stop(self) -> None:
        if self in self._trainer.callbacks:
            self._trainer.callbacks.remove(self)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        num_batches = trainer.num_training_batches
        counts = hvd.allgather_object(num_batches, "lightning.batches", self._strategy.process_set)
        if self._strategy.join:
            _check_validation(trainer)
            return
        if len(set(counts)) == 1:
            return
        ranks = self._strategy.process_set.ranks or range(len(counts))
        counts_by_rank = ", ".join(
            f"rank {rank}: {'unknown' if math.isinf(count) else count}"
            for rank, count in zip(ranks, counts, strict=True)
        )
        fewest = min(counts)
        raise ValueError(
            f"the ranks have different numbers of training batches ({counts_by_rank}), and those "
            f"with more would wait for the others for ever. Let Lightning divide the data "
            f"(use_distributed_sampler=True), give all ranks equally many "
            f"(limit_train_batches={fewest}), or pass HorovodStrategy(join=True)"
        )

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self._strategy.join and _ends_here(trainer):
            self._take_over(trainer, module, hvd.join())

    def _take_over(self, trainer: Any, module: Any, last: int) -> None:
        """Take over the state of the rank that joined last and made the most steps. Collective."""
        hvd.broadcast_parameters(module.state_dict(), last)
        for optimizer in self._strategy.optimizers:
            hvd.broadcast_optimizer_state(optimizer, last)
        loop = trainer.fit_loop.epoch_loop
        own_state = {
            "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "loop": loop.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
        }
        latest = hvd.broadcast_object(own_state, last, "lightning.joined")
        if hvd.rank() == last:
            return
        for config, state in zip(trainer.lr_scheduler_configs, latest["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        trainer.precision_plugin.load_state_dict(latest["precision"])
        # Within an epoch each rank keeps its own batch count, by which it knows its last batch.
        progress, restarting = loop.batch_progress, loop.restarting
        mine_in_epoch, was_last = copy.copy(progress.current), progress.is_last_batch
        loop.load_state_dict(latest["loop"])
        progress.current, progress.is_last_batch = mine_in_epoch, was_last
        loop.restarting = restarting  # loading set it, but nothing is resumed: the epoch ends here


def _check_validation(trainer: Any) -> None:
    """Refuse validation within an epoch: ranks validate together, and only its end is common."""
    if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
        raise ValueError(
            f"join=True lets ranks end an epoch after different numbers of batches, so they can "
            f"validate at its end only, and not with val_check_interval="
            f"{trainer.val_check_interval}: leave it out"
        )


def _ends_here(trainer: Any) -> bool:
    """Return whether this was the rank's last batch of the epoch."""
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._is_training_done or loop.batch_progress.is_last_batch or trainer.should_stop)
