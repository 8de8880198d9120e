"""The callback that commits a `TrainerState` while a Trainer fits."""

from __future__ import annotations

import signal
import threading
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from horovod.lightning.elastic.state import TrainerState
from horovod.lightning.flavours import Flavour


class Commits:
    """Commits `state` every `batches_per_commit` batches, and before every epoch.

    Put it last, so that what other callbacks do belongs to the commit. Where gradients are
    accumulated it waits for the optimizer's step. Data whose division among the ranks is not
    Lightning's (``use_distributed_sampler=False``, or data that cannot be counted) is read from the
    beginning again after ranks have changed, so then it commits before every epoch only.
    """

    flavour: Flavour

    def __init__(self, state: TrainerState, batches_per_commit: int = 1) -> None:
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be positive, not {batches_per_commit}")
        self._state = state
        self._batches_per_commit = batches_per_commit
        self._since = 0
        self._on_sigterm: Any = None
        self._reload: int | None = None  # the user's, while we have one of our own

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "is_horovod"):
            raise ValueError("CommitCallback needs Trainer(strategy='horovod')")
        self._state.attach(trainer)
        trainer.strategy.elastic_state = self._state
        self._since = 0
        self._reload = None
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            self._state.detach()
            self._restore_reload(trainer)
            trainer.strategy.elastic_state = None

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._state.detach()  # what it would save now is no commit

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self._state.resumes_epoch_start:
            trainer.fit_loop.epoch_loop.restarting = (
                False  # its counts are of an epoch that is over
            )
        if any(sampler.resumed for sampler in self._state.samplers):
            # Lightning counts batches when it loads data: those of this epoch are not the next's.
            self._reload = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._state._job is not None and self._on_sigterm is not None and in_main_thread:
            # Lightning would end training at once: a worker that is told to leave first commits.
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._restore_reload(trainer)
        self._since = 0
        self._state.commit_at(epoch_start=True)

    def _restore_reload(self, trainer: Any) -> None:
        if self._reload is not None:
            trainer.reload_dataloaders_every_n_epochs = self._reload
            self._reload = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        samplers = self._state.samplers
        for sampler in samplers:
            sampler.record()
        self._since += 1
        loop = trainer.fit_loop
        last = loop.epoch_loop._num_ready_batches_reached()  # the next epoch begins with a commit
        complete = bool(samplers) and not loop._should_accumulate()
        if self._since >= self._batches_per_commit and complete and not last:
            self._since = 0
            self._state.commit_at(epoch_start=False)


def elastic_loader(loader: Any, trainer: Any, state: TrainerState, flavour: Flavour) -> Any:
    """`loader` with a sampler that can go on in the middle of an epoch, where that is possible."""
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
