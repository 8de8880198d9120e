"""Describe a training to its ranks: the estimator's parameters, and facts about the data."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

from horovod.spark.common.metadata import Metadata
from horovod.spark.common.stores.store_base import RemoteStore

# Lets Arrow allocate by malloc; Arrow reads the variable when it is loaded.
ARROW_POOL = {"ARROW_DEFAULT_MEMORY_POOL": "system"}

_LOADER_OPTIONS = (  # parameters that only Lightning's estimator has
    "loader_num_epochs",
    "debug_data_loader",
    "train_async_data_loader_queue_size",
    "val_async_data_loader_queue_size",
)


def use_system_memory() -> None:
    """Have pyarrow allocate by malloc in this process.

    One thread frees what another has decoded, which pyarrow's own allocator does slowly: with it,
    reading images takes a fifth more processor time, and freed memory stays with the process.
    """
    import pyarrow

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())


@dataclass(frozen=True)
class DataFacts:
    """Facts about the Parquet of one dataset in a store."""

    dataset_idx: int | None
    train_rows: int
    val_rows: int
    metadata: Metadata
    avg_row_size: int


@dataclass
class TrainingJob:
    """One training, described in the same way to all ranks."""

    facts: DataFacts
    store: RemoteStore
    run_id: str
    feature_columns: list[str]
    label_columns: list[str]
    params: dict[str, Any]  # the estimator's, without those that stay on the driver
    payload: bytes  # the pickled model, with its optimizer and losses
    checkpoint: bytes | None = None  # the checkpoint from which the training goes on

    LEFT_OUT = ("model", "optimizer", "store", "backend", "num_proc", "loss", "loss_constructors")

    @classmethod
    def of(
        cls, estimator: Any, facts: DataFacts, run_id: str, features: list[str], payload: bytes
    ) -> TrainingJob:
        names = [p.name for p in estimator.params if p.name not in cls.LEFT_OUT]
        return cls(
            facts=facts,
            store=estimator.getStore().to_remote(run_id, facts.dataset_idx),
            run_id=run_id,
            feature_columns=features,
            label_columns=list(estimator.getLabelCols()),
            params={name: estimator.getOrDefault(name) for name in names},
            payload=payload,
        )

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    @property
    def has_validation(self) -> bool:
        return self.facts.val_rows > 0

    @property
    def val_batch_size(self) -> int:
        return int(self["val_batch_size"] or self["batch_size"])

    def train_steps(self, size: int, *, whole: bool) -> int:
        """Return the number of batches of an epoch on each rank; `whole` counts full ones only."""
        given = self["train_steps_per_epoch"]
        if given:
            return int(given)
        exact = self.facts.train_rows / self["batch_size"] / size
        return max(1, math.floor(exact) if whole else math.ceil(exact))

    def val_steps(self, size: int) -> int:
        given = self["validation_steps_per_epoch"]
        if given:
            return int(given)
        return math.ceil(self.facts.val_rows / self.val_batch_size / size)

    def shuffle_capacity(self) -> int | None:
        """Return the number of rows among which a rank shuffles; None if its buffer decides."""
        given = self["shuffle_buffer_size"]
        if given is not None:
            return int(given)
        return None if self["shuffle"] else 0

    def _targets(self) -> list[str]:
        """Return the columns of labels and of the weights of rows."""
        weights = self["sample_weight_col"]
        return [*self.label_columns, *([weights] if weights else [])]

    def data_module(self, rank: int, size: int, steps: int, default: type[Any]) -> Any:
        """Make the data module of one rank."""
        use_system_memory()
        chosen = self["data_module"] or default
        if isinstance(chosen, str):  # "package.module.Class"
            module, _, name = chosen.rpartition(".")
            chosen = getattr(importlib.import_module(module), name)
        return chosen(
            train_dir=self.store.train_data_path,
            val_dir=self.store.val_data_path,
            num_train_epochs=self["epochs"],
            has_val=self.has_validation,
            train_batch_size=self["batch_size"],
            val_batch_size=self.val_batch_size,
            shuffle=self["shuffle"] and self.shuffle_capacity() != 0,
            transform_fn=self["transformation_fn"],
            inmemory_cache_all=self["inmemory_cache_all"],
            cur_shard=rank,
            shard_count=size,
            schema_fields=list(dict.fromkeys([*self.feature_columns, *self._targets()])),
            storage_options=self.store.storage_options,
            steps_per_epoch_train=steps,
            steps_per_epoch_val=self.val_steps(size) if self.has_validation else 0,
            verbose=bool(self["verbose"]),
            shuffle_capacity=self.shuffle_capacity(),
            seed=self["random_seed"],
            train_reader_workers=self["train_reader_num_workers"],
            val_reader_workers=self["val_reader_num_workers"],
            edit_fields=self["transformation_edit_fields"],
            removed_fields=self["transformation_removed_fields"],
            refuse_nan_in=self._targets() if self["nan_labels"] != "keep" else (),
            disk_cache=self["disk_cache"],
            feature_columns=self.feature_columns,
            label_columns=self.label_columns,
            sample_weight_col=self["sample_weight_col"],
            continuous_cols=self["continuous_cols"],
            categorical_cols=self["categorical_cols"],
            **{name: self.params[name] for name in _LOADER_OPTIONS if name in self.params},
        )
