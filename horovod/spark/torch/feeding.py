"""From a batch of columns to the inputs of a PyTorch model, its losses and its metrics.

The ranks, the driver's trial, and modules that are made of plain models use all of this; models
that predict use `Feed`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
Loss = Callable[..., torch.Tensor]


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


class Objective:
    """The losses and metrics of each label, and how much labels and rows count."""

    def __init__(
        self,
        feed: Feed,
        loss: Any,
        constructors: Any,
        weights: Sequence[float] | None,
        metrics: Sequence[Any] | None,
    ) -> None:
        count = len(feed.labels)
        by_row = feed.sample_weight_col is not None  # losses return one value for each row
        self.functions: list[Loss]
        if constructors is not None:
            makers = to_list(constructors, count, "loss_constructors")
            self.functions = [make(reduction="none") if by_row else make() for make in makers]
        else:
            functions = to_list(loss, count, "losses")
            self.functions = [_for_each_row(each) for each in functions] if by_row else functions
        self.weights = to_list(weights or [1.0 / count] * count, count, "loss weights")
        self.metrics = [to_list(group, count, "metrics") for group in metrics or ()]

    def evaluate(
        self, model: Any, inputs: Any, labels: Any, sample_weights: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Call the model; return its outputs, the labels in their shapes, and the total loss.

        The total is the weighted sum of the labels' losses. Weights of rows multiply the rows'
        losses before the mean is taken over rows: two rows of the same weight count the same, in
        whatever batches they are.
        """
        outputs, labels = transform_outputs(model(*inputs), labels)
        losses = []
        for output, label, weight, function in zip(
            outputs, labels, self.weights, self.functions, strict=True
        ):
            found = function(output, label)
            if sample_weights is not None:
                by_row = found.reshape(len(sample_weights), -1).mean(1)
                found = (by_row * sample_weights).mean()
            losses.append(found if weight == 1 else found * weight)
        total = losses[0] if len(losses) == 1 else torch.stack(losses)
        return outputs, labels, total.sum() if total.dim() else total


def to_list(value: Any, length: int, name: str) -> list[Any]:
    """Return a list with one value for each label; a single value stands for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(values) == 1:
        values *= length
    if len(values) != length:
        raise ValueError(f"there are {len(values)} {name} for {length} label column(s)")
    return values


def _for_each_row(loss: Any) -> Loss:
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        loss = copy.copy(loss)
        loss.reduction = "none"
        return loss
    try:
        accepts = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        accepts = False
    if not accepts:
        raise ValueError(
            "sample_weight_col needs a loss that takes reduction='none' (a loss of torch.nn or "
            f"torch.nn.functional, or loss_constructors), which {loss!r} does not"
        )
    return lambda output, label: loss(output, label, reduction="none")


def transform_outputs(
    outputs: Any, labels: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a list of outputs, and labels of the shapes and types that losses want.

    A label with as many values as the output gets its shape and type; other labels, such as class
    indices, stay as they are.
    """
    given = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    if len(given) != len(labels):
        raise ValueError(f"the model gave {len(given)} output(s) for {len(labels)} label column(s)")
    fitting = []
    for output, label in zip(given, labels, strict=True):
        if output.numel() == label.numel():
            label = label.reshape(output.shape).to(output.dtype)
        fitting.append(label)
    return given, fitting


class Averages:
    """Means of the loss and metrics over the rows of an epoch, on all ranks."""

    def __init__(self, groups: Sequence[Sequence[Callable[..., Any]]]) -> None:
        self._groups = groups
        count = 1 + sum(len(group) for group in groups)
        self._sums = [torch.zeros((), dtype=torch.float64)] * count
        self._rows = 0

    def add(
        self, rows: int, loss: torch.Tensor, outputs: Sequence[Any], labels: Sequence[Any]
    ) -> None:
        """Add the loss and metrics of a batch; sums stay on its device, so that nobody waits."""
        with torch.no_grad():
            values = [loss]
            for group in self._groups:
                for metric, output, label in zip(group, outputs, labels, strict=True):
                    values.append(torch.as_tensor(metric(output, label)))
            for index, value in enumerate(values):
                mean = value.detach().double()
                mean = mean.mean() if mean.dim() else mean
                before = self._sums[index].to(mean.device)
                self._sums[index] = torch.add(before, mean, alpha=rows)
        self._rows += rows

    def result(self, hvd: Any, name: str) -> dict[str, Any]:
        """Return the means over all ranks, the metrics in their groups."""
        sums = [value.cpu() for value in self._sums]
        total = torch.stack([*sums, torch.tensor(float(self._rows), dtype=torch.float64)])
        if hvd.size() > 1:
            total = hvd.allreduce(total, op=hvd.Sum, name=f"spark.{name}")
        loss, *means = (total[:-1] / total[-1].clamp(min=1)).tolist()
        rest = iter(means)
        metrics = [[next(rest) for _ in group] for group in self._groups]
        return {"loss": loss, "all_metrics": metrics}
