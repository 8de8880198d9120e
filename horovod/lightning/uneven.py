"""Ranks with different numbers of training batches: an error before training starts, or `join`.

Gradients are reduced by all ranks together, so a rank with fewer batches would leave the others
waiting. With ``HorovodStrategy(join=True)`` it waits in `hvd.join()` at the end of its epoch
instead, adding zeros to what the others average, and then takes over what the rank has that came
last: parameters, optimizer state, schedulers and the counts of steps.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import horovod.torch as hvd
from horovod.lightning.flavours import Flavour


def watch_batches(strategy: Any, trainer: Any) -> Any:
    """Put a callback that looks after this before all others; its `stop` takes it away."""
    if strategy.world_size == 1:
        return None
    watcher = _callback_class(strategy.flavour)(strategy, trainer)
    trainer.callbacks.insert(0, watcher)
    return watcher


def _callback_class(flavour: Flavour) -> Any:
    base = flavour.trainer_part("callbacks").Callback
    return type("BatchWatcher", (BatchWatcher, base), {"__module__": __name__})


class BatchWatcher:
    """Compares the numbers of batches, and joins."""

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer

    def stop(self) -> None:
        if self in self._trainer.callbacks:
            self._trainer.callbacks.remove(self)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        mine = trainer.num_training_batches
        counts = hvd.allgather_object(mine, "lightning.batches", self._strategy.process_set)
        if self._strategy.join:
            _check_validation(trainer)
            return
        if len(set(counts)) == 1:
            return
        ranks = self._strategy.process_set.ranks or range(len(counts))
        told = ", ".join(
            f"rank {rank}: {'unknown' if math.isinf(count) else count}"
            for rank, count in zip(ranks, counts, strict=True)
        )
        fewest = min(counts)
        raise ValueError(
            f"the ranks have different numbers of training batches ({told}), and those with more "
            f"would wait for the others for ever. Let Lightning divide the data "
            f"(use_distributed_sampler=True), give all ranks equally many "
            f"(limit_train_batches={fewest}), or pass HorovodStrategy(join=True)"
        )

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self._strategy.join and _ends_here(trainer):
            self._take_over(trainer, module, hvd.join())

    def _take_over(self, trainer: Any, module: Any, last: int) -> None:
        """What the rank has that came last, and so has made the most steps. Collective."""
        hvd.broadcast_parameters(module.state_dict(), last)
        for optimizer in self._strategy.optimizers:
            hvd.broadcast_optimizer_state(optimizer, last)
        loop = trainer.fit_loop.epoch_loop
        mine = {
            "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "loop": loop.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
        }
        theirs = hvd.broadcast_object(mine, last, "lightning.joined")
        if hvd.rank() == last:
            return
        for config, state in zip(trainer.lr_scheduler_configs, theirs["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        trainer.precision_plugin.load_state_dict(theirs["precision"])
        # Within the epoch each rank counts its own batches, by which it knows the last of them.
        progress, restarting = loop.batch_progress, loop.restarting
        mine_in_epoch, was_last = copy.copy(progress.current), progress.is_last_batch
        loop.load_state_dict(theirs["loop"])
        progress.current, progress.is_last_batch = mine_in_epoch, was_last
        loop.restarting = restarting  # nothing is resumed: the epoch ends here


def _check_validation(trainer: Any) -> None:
    """Ranks validate together, which they can only at the end: before, they are not in step."""
    if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
        raise ValueError(
            f"join=True lets ranks end an epoch after different numbers of batches, so they can "
            f"validate at its end only, and not with val_check_interval="
            f"{trainer.val_check_interval}: leave it out"
        )


def _ends_here(trainer: Any) -> bool:
    """Whether this was the rank's last batch of the epoch."""
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._is_training_done or loop.batch_progress.is_last_batch or trainer.should_stop)
