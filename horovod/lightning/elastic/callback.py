"""The callback that commits a `TrainerState` while a Trainer fits."""

from __future__ import annotations

import functools
import signal
import threading
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from horovod.lightning.elastic.state import TrainerState
from horovod.lightning.flavours import Flavour, join_with_base


class CommitCallbackMixin:
    """Commits a `TrainerState` every few batches, and before every epoch.

    Put it last in the list of callbacks, so that the commit contains the effects of the others.
    Where gradients are accumulated it waits for the optimizer's step. If Lightning does not divide
    the data among the ranks (``use_distributed_sampler=False``, or data without a length), an epoch
    is read from its beginning again after ranks have changed, so the callback then commits before
    every epoch only.

    Args:
        state: The state to commit.
        batches_per_commit: The number of batches between commits; 1 by default.

    Raises:
        ValueError: `batches_per_commit` is not positive.
    """

    flavour: Flavour

    def __init__(self, state: TrainerState, batches_per_commit: int = 1) -> None:
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be positive, not {batches_per_commit}")
        self._state = state
        self._batches_per_commit = batches_per_commit
        self._batches_since_commit = 0
        self._on_sigterm: Any = None
        self._users_reload_interval: int | None = None  # to be restored while ours is in force

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "is_horovod"):
            raise ValueError("CommitCallback needs Trainer(strategy='horovod')")
        self._state.attach(trainer)
        trainer.strategy.elastic_state = self._state
        self._batches_since_commit = 0
        self._users_reload_interval = None
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            self._state.detach()
            self._restore_reload_interval(trainer)
            trainer.strategy.elastic_state = None

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._state.detach()  # a snapshot taken now would not be a commit

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self._state.resumes_epoch_start:
            # The loop's counts belong to an epoch that is over.
            trainer.fit_loop.epoch_loop.restarting = False
        if any(sampler.is_resumed for sampler in self._state.samplers):
            # Lightning counts batches when it loads data, and the next epoch will have another
            # number of them: make it load again then.
            self._users_reload_interval = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._state._job is not None and self._on_sigterm is not None and in_main_thread:
            # Lightning's handler would end training at once. The handler from before lets a worker
            # that is told to leave commit first.
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._restore_reload_interval(trainer)
        self._batches_since_commit = 0
        self._state.commit_at(epoch_start=True)

    def _restore_reload_interval(self, trainer: Any) -> None:
        if self._users_reload_interval is not None:
            trainer.reload_dataloaders_every_n_epochs = self._users_reload_interval
            self._users_reload_interval = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        samplers = self._state.samplers
        for sampler in samplers:
            sampler.record()
        self._batches_since_commit += 1
        loop = trainer.fit_loop
        # No commit after the last batch: the next epoch begins with one.
        is_last = loop.epoch_loop._num_ready_batches_reached()
        is_complete = bool(samplers) and not loop._should_accumulate()
        if self._batches_since_commit >= self._batches_per_commit and is_complete and not is_last:
            self._batches_since_commit = 0
            self._state.commit_at(epoch_start=False)


@functools.cache
def commit_callback_class(flavour: Flavour) -> Any:
    """Make the callback for this package's Trainer."""
    base = flavour.trainer_part("callbacks").Callback
    return join_with_base("CommitCallback", CommitCallbackMixin, base, flavour)


def elastic_loader(loader: Any, trainer: Any, state: TrainerState, flavour: Flavour) -> Any:
    """Return the loader with a sampler that can resume in the middle of an epoch, if possible."""
    if not isinstance(loader, DataLoader) or type(loader.sampler) is not DistributedSampler:
        return loader
    batches = loader.batch_sampler
    size = loader.batch_size or getattr(batches, "batch_size", None)
    if size is None or (batches is not None and not isinstance(batches, BatchSampler)):
        return loader
    old = loader.sampler
    sampler = state.sampler_for(old.dataset, old.shuffle, old.seed, size)
    sampler.set_epoch(max(sampler.epoch, trainer.current_epoch))
    return flavour.trainer_part("utilities.data")._update_dataloader(
        loader, sampler, mode=trainer.state.stage
    )
