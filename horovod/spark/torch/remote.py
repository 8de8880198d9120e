"""Train on one rank for a `TorchEstimator`: read a share of the rows, train, report from rank 0."""

from __future__ import annotations

import io
import json
import os
from typing import Any

import cloudpickle
import torch

import horovod.torch as hvd
from horovod.spark.common.job import TrainingJob
from horovod.spark.task import local_device_index
from horovod.spark.torch.datamodule import PetastormDataModule
from horovod.spark.torch.feeding import Averages, Feed, Objective, transform_outputs


def train(job: TrainingJob) -> dict[str, Any] | None:
    """Train; rank 0 returns the history and the states of model and optimizer."""
    hvd.init()
    return _Training(job).run()


class _Training:
    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        seed = job["random_seed"]
        if seed is not None:
            torch.manual_seed(seed)
        self.device = _device(job["use_gpu"])
        packed = cloudpickle.loads(job.payload)
        self.model, self.optimizer = packed["model"], packed["optimizer"]
        self.feed = Feed(
            job.feature_columns,
            job.label_columns,
            job["sample_weight_col"],
            job["input_shapes"],
            job["label_shapes"],
            frozenset(job["categorical_cols"] or ()),
        )
        self.objective = Objective(
            self.feed,
            packed["loss"],
            packed["loss_constructors"],
            job["loss_weights"],
            job["metrics"],
        )
        self.passes = job["backward_passes_per_step"]
        self.batch_index = 0
        self.model.to(self.device)
        if job.checkpoint is not None:
            saved = torch.load(
                io.BytesIO(job.checkpoint), map_location=self.device, weights_only=True
            )
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and name != "step":
                    state[name] = value.to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * hvd.size()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=job["gradient_compression"] or hvd.Compression.none,
            backward_passes_per_step=self.passes,
        )

    def run(self) -> dict[str, Any] | None:
        job = self.job
        steps = job.train_steps(hvd.size(), whole=True)
        steps = max(1, steps // self.passes) * self.passes
        history: list[dict[str, Any]] = []
        with (
            job.data_module(hvd.rank(), hvd.size(), steps, PetastormDataModule) as data,
            job.store.get_local_output_dir() as folder,
        ):
            train_data = data.train_data()
            val_data = data.val_data() if job.has_validation else None
            self._tell("on_train_begin", None)
            for epoch in range(job["epochs"]):
                self._tell("on_epoch_begin", None, epoch)
                found: dict[str, Any] = {"epoch": epoch, "train": self._train(train_data)}
                if val_data is not None:
                    found["validation"] = self._validate(val_data)
                history.append(found)
                self._tell("on_epoch_end", found, epoch)
                if hvd.rank() == 0:
                    if job["verbose"]:
                        print(_line(found, job["epochs"]), flush=True)
                    self._keep(folder, history)
            self._tell("on_train_end", history[-1] if history else None)
        if hvd.rank() != 0:
            return None
        return {"history": history, "state": self._state()}

    def _train(self, batches: Any) -> dict[str, Any]:
        averages = Averages(self.objective.metrics)
        self.model.train()
        for batch in batches:
            inputs, labels, sample_weights = self.feed.split(batch, self.device)
            if self.job["train_minibatch_fn"] is None:
                outputs, labels, loss = self._step(inputs, labels, sample_weights)
            else:
                outputs, loss = self.job["train_minibatch_fn"](
                    self.model,
                    self.optimizer,
                    transform_outputs,
                    self.objective.functions,
                    inputs,
                    labels,
                    sample_weights,
                )
                if self.objective.metrics:
                    outputs, labels = transform_outputs(outputs, labels)
            averages.add(len(inputs[0]), loss, outputs, labels)
        return averages.result(hvd, "train")

    def _step(self, *batch: Any) -> tuple[Any, Any, torch.Tensor]:
        """Compute the gradients of a batch; make a step with those of `passes` batches."""
        if self.batch_index % self.passes == 0:
            self.optimizer.zero_grad()
        outputs, labels, loss = self.objective.evaluate(self.model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.batch_index += 1
        if self.batch_index % self.passes == 0:
            self.optimizer.step()
        return outputs, labels, loss

    @torch.no_grad()
    def _validate(self, batches: Any) -> dict[str, Any]:
        averages = Averages(self.objective.metrics)
        self.model.eval()
        for batch in batches:
            inputs, labels, sample_weights = self.feed.split(batch, self.device)
            outputs, labels, loss = self.objective.evaluate(
                self.model, inputs, labels, sample_weights
            )
            averages.add(len(inputs[0]), loss, outputs, labels)
        return averages.result(hvd, "validation")

    def _tell(self, what: str, logs: Any, *arguments: Any) -> None:
        for callback in self.job["callbacks"] or ():
            method = getattr(callback, what, None)
            if method is not None:
                method(*arguments, logs)

    def _state(self) -> bytes:
        """Return the states of model and optimizer, as training on a single process gives them."""
        optimizer = self.optimizer.state_dict()
        for group in optimizer["param_groups"]:
            group["lr"] = group["lr"] / hvd.size()
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": optimizer}, file)
        return file.getvalue()

    def _keep(self, folder: str, history: Any) -> None:
        """Write the checkpoint and the log to the store; rank 0 calls it."""
        store = self.job.store
        if not store.saving_runs:
            return
        with open(os.path.join(folder, store.checkpoint_filename), "wb") as file:
            file.write(self._state())
        logs = os.path.join(folder, store.logs_subdir)
        os.makedirs(logs, exist_ok=True)
        with open(os.path.join(logs, "history.jsonl"), "a", encoding="utf-8") as log:
            log.write(json.dumps(history[-1]) + "\n")
        store.sync(folder)


def _device(use_gpu: bool) -> torch.device:
    available = use_gpu and torch.cuda.is_available()
    everywhere = hvd.allgather_object(available)
    if len(set(everywhere)) > 1:
        without = [rank for rank, found in enumerate(everywhere) if not found]
        raise RuntimeError(
            f"rank(s) {without} of {len(everywhere)} have no GPU and the others have: give all "
            "executors one, or set use_gpu=False"
        )
    if not available:
        return torch.device("cpu")
    index = local_device_index(hvd.local_rank())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _line(found: dict[str, Any], epochs: int) -> str:
    text = f"epoch {found['epoch'] + 1}/{epochs}: loss {found['train']['loss']:.6g}"
    if "validation" in found:
        text += f", validation loss {found['validation']['loss']:.6g}"
    return text
