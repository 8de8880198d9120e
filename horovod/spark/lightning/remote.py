"""Train on one rank for Lightning's `TorchEstimator`: run a Trainer on a share of the rows."""

from __future__ import annotations

import io
import os
from typing import Any

import cloudpickle
import torch

import horovod.torch as hvd
from horovod.lightning import flavours
from horovod.lightning.strategy import trainer_strategy_class
from horovod.spark.common.job import TrainingJob
from horovod.spark.lightning.datamodule import PetastormDataModule


def train(job: TrainingJob) -> dict[str, Any] | None:
    """Train; rank 0 returns the history and the module's state."""
    hvd.init()
    module = cloudpickle.loads(job.payload)["model"]
    flavour = flavour_of(module)
    if job["random_seed"] is not None:
        torch.manual_seed(job["random_seed"])
    steps = job.train_steps(hvd.size(), whole=True)
    with (
        job.data_module(hvd.rank(), hvd.size(), steps, PetastormDataModule) as data,
        job.store.get_local_output_dir() as folder,
    ):
        history = _callback(flavour, _History)
        trainer = _trainer(job, flavour, folder, history)
        trainer.fit(
            module,
            train_dataloaders=data.train_dataloader(),
            val_dataloaders=data.val_dataloader() if job.has_validation else None,
            ckpt_path=_checkpoint_file(job, folder),
        )
        if hvd.rank() == 0 and job.store.saving_runs:
            job.store.sync(folder)
    if hvd.rank() != 0:
        return None
    file = io.BytesIO()
    torch.save({name: value.cpu() for name, value in module.state_dict().items()}, file)
    return {"history": history.epochs, "state": file.getvalue()}


def flavour_of(module: Any) -> flavours.Flavour | None:
    """Return the Lightning package whose `LightningModule` a module derives from, if it does."""
    for base in type(module).__mro__:
        for flavour in flavours.FLAVOURS:
            if base.__name__ == "LightningModule" and base.__module__.startswith(flavour.pytorch):
                return flavour
    return None


def _trainer(job: TrainingJob, flavour: Any, folder: str, history: Any) -> Any:
    strategy = trainer_strategy_class(flavour)(
        compression=job["gradient_compression"] or hvd.Compression.none
    )
    callbacks = [_callback(flavour, _Rates), history, *(job["callbacks"] or ())]
    if job["terminate_on_nan"]:
        callbacks.append(_callback(flavour, _Finite))
    logger: Any = False
    if job.store.saving_runs:
        logger = _logger(job, flavour, folder)
        parts = flavour.trainer_part("callbacks")
        if not any(isinstance(each, parts.ModelCheckpoint) for each in callbacks):
            callbacks.append(
                parts.ModelCheckpoint(
                    dirpath=folder,
                    filename=job.store.checkpoint_filename,
                    enable_version_counter=False,
                )
            )
        callbacks.append(_callback(flavour, _Sync, parts.Checkpoint, job.store, folder))
    gpus = job["num_gpus"]
    accelerator = "auto" if job["use_gpu"] and gpus != 0 else "cpu"
    arguments: dict[str, Any] = {
        "strategy": strategy,
        "accelerator": accelerator,
        "max_epochs": job["epochs"],
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
        "logger": logger,
        "log_every_n_steps": job["log_every_n_steps"],
        "profiler": job["profiler"],
        "default_root_dir": folder,
        "enable_checkpointing": job.store.saving_runs,
        "enable_progress_bar": bool(job["verbose"]) and hvd.rank() == 0,
        "enable_model_summary": bool(job["verbose"]) and hvd.rank() == 0,
    }
    arguments.update(job["trainer_args"] or {})
    if arguments["enable_checkpointing"] is False:
        arguments["callbacks"] = [
            each
            for each in arguments["callbacks"]
            if not isinstance(each, flavour.trainer_part("callbacks").Checkpoint)
        ]
    return flavour.trainer_part("trainer").Trainer(**arguments)


def _logger(job: TrainingJob, flavour: Any, folder: str) -> Any:
    given = job["logger"]
    if given is not None:
        return given
    loggers = flavour.trainer_part("loggers")
    logs = os.path.join(folder, job.store.logs_subdir)
    try:
        return loggers.TensorBoardLogger(logs, name="", version="")
    except ModuleNotFoundError:  # neither tensorboard nor tensorboardX
        return loggers.CSVLogger(logs, name="", version="")


def _checkpoint_file(job: TrainingJob, folder: str) -> str | None:
    """Write the checkpoint to go on from, if there is one, to a file of this rank."""
    if job.checkpoint is None:
        return None
    path = os.path.join(folder, f"{job.store.checkpoint_filename}.ckpt")
    with open(path, "wb") as file:
        file.write(job.checkpoint)
    return path


def _callback(flavour: Any, mixin: type, base: Any = None, *arguments: Any) -> Any:
    """Make a callback of ours for the Lightning package of the module."""
    base = base or flavour.trainer_part("callbacks").Callback
    return type(mixin.__name__, (mixin, base), {})(*arguments)


class _Rates:
    """Multiplies learning rates by the number of ranks, as all estimators do."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.ckpt_path is not None:
            return  # the checkpoint has rates that were multiplied already
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * hvd.size()
                if "initial_lr" in group:
                    group["initial_lr"] = group["initial_lr"] * hvd.size()
        for config in trainer.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [
                    rate * hvd.size() for rate in config.scheduler.base_lrs
                ]


class _History:
    """The metrics that were logged, epoch by epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.epochs.append({"epoch": trainer.current_epoch, **found})


class _Finite:
    """Ends the training at a loss that is not finite: Lightning 2 has no `terminate_on_nan`."""

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        if not torch.isfinite(loss).all():
            raise ValueError(
                f"rank {hvd.rank()}: the loss is {float(loss.detach())} in epoch "
                f"{trainer.current_epoch}, step {trainer.global_step}, and terminate_on_nan is set"
            )


class _Sync:
    """Copies checkpoints and logs to the store, after the checkpoint of an epoch was written.

    It is a callback for checkpoints, because Lightning calls those last, in their order.
    """

    def __init__(self, store: Any, folder: str) -> None:
        self._store = store
        self._folder = folder

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()
            self._store.sync(self._folder)
