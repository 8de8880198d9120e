"""Makes a Lightning module of a plain PyTorch model with an optimizer and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.lightning import flavours
from horovod.spark.torch.feeding import Feed, Objective


def to_lightning_module(
    model: Any,
    optimizer: Any,
    loss_fns: Any,
    loss_weights: Sequence[float] | None,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    sample_weights_col: str | None = None,
    validation: Any = None,
    *,
    loss_constructors: Any = None,
    metrics: Sequence[Any] = (),
    input_shapes: Any = None,
    label_shapes: Any = None,
) -> Any:
    """Make the module, of a class that derives from the Lightning package that is in use."""
    base = flavours.preferred_flavour().trainer_part("core").LightningModule
    feed = Feed(
        list(feature_cols), list(label_cols), sample_weights_col, input_shapes, label_shapes
    )
    objective = Objective(feed, loss_fns, loss_constructors, loss_weights, metrics)

    class ConvertedModule(base):  # type: ignore[misc, valid-type]
        takes_columns = True  # numbers as batches of shape (n, 1), when it predicts as well

        def __init__(self) -> None:
            super().__init__()
            self._model = model
            self._optimizer = optimizer

        def forward(self, *inputs: Any) -> Any:
            return self._model(*inputs)

        def configure_optimizers(self) -> Any:
            return self._optimizer

        def _step(self, batch: Any, prefix: str) -> torch.Tensor:
            inputs, labels, sample_weights = feed.split(batch)
            outputs, labels, loss = objective.evaluate(self, inputs, labels, sample_weights)
            options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True}
            options["batch_size"] = len(inputs[0])
            self.log(f"{prefix}loss", loss, **options)
            for number, group in enumerate(objective.metrics):
                for index, metric in enumerate(group):
                    value = torch.as_tensor(metric(outputs[index], labels[index]))
                    self.log(f"{prefix}metric_{number}_{index}", value.float(), **options)
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self._step(batch, "train_")

        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self._step(batch, "val_")

    return ConvertedModule()
