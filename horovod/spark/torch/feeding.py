"""Make the inputs of a PyTorch model and the labels of its losses from a batch of columns.

The ranks, the driver's trial, and models that predict use this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Feed:
    """Which columns are inputs, labels and weights, with the shapes that they get."""

    features: list[str]
    labels: list[str] = field(default_factory=list)
    sample_weight_col: str | None = None
    input_shapes: Any = None
    label_shapes: Any = None
    categorical: frozenset[str] = frozenset()

    def split(
        self, batch: Batch, device: torch.device | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        """Return the inputs, the labels and the weights of a batch, on the device."""
        if device is not None:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
        labels = [
            as_label(batch[name], _shape(self.label_shapes, index))
            for index, name in enumerate(self.labels)
        ]
        weights = self.sample_weight_col
        return self.inputs(batch), labels, None if weights is None else batch[weights].float()

    def inputs(self, batch: Batch, *, as_columns: bool = True) -> list[torch.Tensor]:
        """Return the inputs of the model in their order; see `as_input` for `as_columns`."""
        return [
            as_input(
                batch[name],
                _shape(self.input_shapes, index),
                name in self.categorical,
                as_column=as_columns,
            )
            for index, name in enumerate(self.features)
        ]


def as_input(
    tensor: torch.Tensor, shape: Any, categorical: bool, *, as_column: bool = True
) -> torch.Tensor:
    """Return a column as the model gets it: floats, or integers if it is categorical.

    With `as_column` n numbers become a batch of shape (n, 1), as layers want it. Categories keep
    the shape (n,), as embeddings want it.
    """
    tensor = tensor.long() if categorical else tensor.float()
    if shape:
        return tensor.reshape(tuple(shape))
    return tensor.unsqueeze(1) if as_column and tensor.dim() == 1 and not categorical else tensor


def as_label(tensor: torch.Tensor, shape: Any) -> torch.Tensor:
    """Return a label as losses get it: float32, or int64 if it holds whole numbers."""
    tensor = tensor.float() if tensor.is_floating_point() else tensor.long()
    return tensor.reshape(tuple(shape)) if shape else tensor


def _shape(shapes: Any, index: int) -> Any:
    return shapes[index] if shapes else None
