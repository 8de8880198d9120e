"""What a PyTorch model, its losses and the driver's trial get of a batch of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Feed:
    """Which columns are inputs, labels and weights, and what they become."""

    features: list[str]
    labels: list[str]
    sample_weight_col: str | None
    input_shapes: Any
    label_shapes: Any
    categorical: frozenset[str]

    def split(
        self, batch: Batch, device: torch.device | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        """Inputs, labels and weights of a batch, on the device."""
        if device is not None:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
        inputs = [
            as_input(batch[name], _shape(self.input_shapes, place), name in self.categorical)
            for place, name in enumerate(self.features)
        ]
        labels = [
            as_label(batch[name], _shape(self.label_shapes, place))
            for place, name in enumerate(self.labels)
        ]
        weights = self.sample_weight_col
        return inputs, labels, None if weights is None else batch[weights].float()


def as_input(
    tensor: torch.Tensor, shape: Any, categorical: bool, *, as_column: bool = True
) -> torch.Tensor:
    """A column as the model gets it: floats, or integers if it is categorical.

    `as_column` makes a batch of shape (n, 1) of n numbers, as layers want it. Categories stay a
    batch of shape (n,), as embeddings want them.
    """
    tensor = tensor.long() if categorical else tensor.float()
    if shape:
        return tensor.reshape(tuple(shape))
    return tensor.unsqueeze(1) if as_column and tensor.dim() == 1 and not categorical else tensor


def as_label(tensor: torch.Tensor, shape: Any) -> torch.Tensor:
    """A label as losses get it: float32, or int64 if it is a whole number of any size."""
    tensor = tensor.float() if tensor.is_floating_point() else tensor.long()
    return tensor.reshape(tuple(shape)) if shape else tensor


def _shape(shapes: Any, place: int) -> Any:
    return shapes[place] if shapes else None
