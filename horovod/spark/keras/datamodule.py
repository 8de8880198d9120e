"""Read batches for Keras from Parquet: (inputs, labels) or (inputs, labels, sample weights)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from horovod.spark.common.datamodule import ParquetDataModule
from horovod.spark.common.reading.columns import Rows


class PetastormDataModule(ParquetDataModule):
    """The default data module: named as upstream names it, without Petastorm behind it."""

    short_name = "petastorm"

    def __init__(
        self,
        *args: Any,
        feature_columns: Sequence[str] = (),
        label_columns: Sequence[str] = (),
        sample_weight_col: str | None = None,
        continuous_cols: Sequence[str] | None = None,
        categorical_cols: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.feature_columns = list(feature_columns)
        self.label_columns = list(label_columns)
        self.sample_weight_col = sample_weight_col
        self.continuous_cols = list(continuous_cols or ())
        self.categorical_cols = list(categorical_cols or ())
        self.inputs: list[tuple[Any, Any]] | None = None  # dtype and shape that the model wants
        self.outputs: list[Any] | None = None  # shapes
        self.named_inputs = False

    def fit_model(
        self,
        inputs: list[tuple[Any, Any]],
        outputs: list[Any],
        named_inputs: bool,
        label_shapes: Sequence[Sequence[int]] | None,
    ) -> None:
        """Tell the types and shapes that the model takes and returns, so that batches get them."""
        self.inputs, self.outputs, self.named_inputs = inputs, outputs, named_inputs
        if label_shapes is not None:
            self.outputs = [tuple(shape)[1:] for shape in label_shapes]

    def train_data(self) -> Iterator[Any]:
        return map(self._batch, self.train_batches())

    def val_data(self) -> Iterator[Any]:
        """Yield validations without end, of exactly `steps_per_epoch_val` batches each."""
        while True:
            yield from map(self._batch, self.equal_val_batches())

    def _batch(self, rows: Rows) -> Any:
        features = [rows[name] for name in self.feature_columns]
        if self.inputs is not None:
            features = [
                array.reshape(len(array), *shape).astype(dtype, copy=False)
                for array, (dtype, shape) in zip(features, self.inputs, strict=True)
            ]
        labels = []
        for index, name in enumerate(self.label_columns):
            label = rows[name]
            label = label.astype(np.float32) if label.dtype == np.float64 else label
            shape = self.outputs[index] if self.outputs else None
            if shape is not None and np.prod(label.shape[1:]) == np.prod(shape):
                label = label.reshape(len(label), *shape)
            labels.append(label)
        x: Any = tuple(features) if len(features) > 1 else features[0]
        if self.named_inputs:
            x = dict(zip(self.feature_columns, features, strict=True))
        y = tuple(labels) if len(labels) > 1 else labels[0]
        if self.sample_weight_col is None:
            return x, y
        weights = rows[self.sample_weight_col].astype(np.float32)
        return x, y, tuple([weights] * len(labels)) if len(labels) > 1 else weights


class NVTabularDataModule(PetastormDataModule):
    """Inputs by name for tabular models: `continuous_cols` float32, `categorical_cols` int64.

    Upstream reads these with NVTabular, which is no longer developed; this class uses the reader of
    all other data modules.
    """

    short_name = "nvtabular"

    def _batch(self, rows: Rows) -> Any:
        _, *rest = super()._batch(rows)
        x = {name: _column(rows[name], np.float32) for name in self.continuous_cols}
        x |= {name: _column(rows[name], np.int64) for name in self.categorical_cols}
        return (x, *rest)


def _column(array: Any, kind: Any) -> Any:
    array = array.astype(kind, copy=False)
    return array.reshape(len(array), -1)
