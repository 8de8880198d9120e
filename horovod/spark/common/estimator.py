"""`HorovodEstimator`, which trains from a DataFrame, and `HorovodModel`, which predicts."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from pyspark.ml import Estimator, Model

from horovod.spark.common import util
from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.checks import check_nan_labels, check_types, check_validation
from horovod.spark.common.job import ARROW_POOL, DataFacts, TrainingJob
from horovod.spark.common.metadata import Metadata, describe_rows, head_of_frame
from horovod.spark.common.params import EstimatorParams, ModelParams
from horovod.spark.common.prediction import Predictor, transform
from horovod.spark.common.reading.columns import Rows, rows_of
from horovod.spark.common.reading.parquet_files import ParquetFiles
from horovod.spark.common.reading.row_buffer import row_count
from horovod.spark.common.serialization import Persistent
from horovod.spark.common.store import Store

TRIAL_ROWS = 8  # rows that the driver tries the model with before it starts processes


class HorovodEstimator(Persistent, EstimatorParams, Estimator):
    """Base class of all estimators."""

    run_id_prefix = "horovod"
    _trainer: Callable[[TrainingJob], Any]  # the function that each process calls with the job

    def fit(self, df: Any, params: Any = None) -> Any:
        """Train the model on the rows of a DataFrame.

        The rows are written to the store as Parquet first, once for each DataFrame, store and
        validation.

        Args:
            df: The DataFrame.
            params: Dict of parameters to use in place of the estimator's, or a list of such dicts.
                By default there are none.

        Returns:
            The trained model, such as a `TorchModel`; a list of models for a list of dicts.

        Raises:
            ValueError: A parameter is missing or wrong, or does not fit the columns.
        """
        return super().fit(df, params)

    def fit_on_parquet(self, params: Any = None, dataset_idx: int | None = None) -> Any:
        """Train the model on Parquet data that is in the store already.

        Args:
            params: Dict of parameters to use in place of the estimator's. By default there are
                none.
            dataset_idx: Number of the data set in the store. By default the paths without a number.

        Returns:
            The trained model, such as a `TorchModel`.

        Raises:
            ValueError: A parameter is missing or wrong, or there is no data.
        """
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        backend = self._checked_backend()
        store = self._checked_store()
        labels = self._checked_labels()
        payload = self._pack()
        train_rows, val_rows, metadata, row_size = util.get_simple_meta_from_parquet(
            store, labels, self.getFeatureCols(), self.getSampleWeightCol(), dataset_idx
        )
        validation = self.getValidation()
        if validation and not val_rows:
            raise ValueError(
                f"validation is set, but there is no Parquet data at "
                f"{store.get_val_data_path(dataset_idx)}"
            )
        if not validation:
            val_rows = 0  # ignore stored validation rows: nobody asked for validation
        if self.getNanLabels() == "drop":
            raise ValueError(
                "nan_labels='drop' needs a DataFrame: fit_on_parquet trains with all rows that are "
                "in the store"
            )
        if self._feeds_columns():
            files = ParquetFiles(store.get_train_data_path(dataset_idx), store.storage_options)
            rows = rows_of(files.dataset.head(self._trial_rows(), columns=list(metadata)))
            self._check_rows(rows, metadata, payload)
        facts = DataFacts(dataset_idx, train_rows, val_rows, metadata, row_size)
        return self._fit_prepared(backend, facts, payload)

    def _fit(self, df: Any) -> Any:
        backend = self._checked_backend()
        store = self._checked_store()
        payload = self._pack()
        columns = util.choose_columns(
            df,
            self._checked_labels(),
            self.getFeatureCols(),
            self.getValidation(),
            self.getSampleWeightCol(),
        )
        if self._feeds_columns():
            check_types({name: df.schema[name].dataType for name in columns})
            rows = head_of_frame(df, columns, self._trial_rows())
            self._check_rows(rows, describe_rows(rows, dict(df.dtypes)), payload)
        with util.prepare_data(
            backend.num_processes(),
            store,
            df,
            label_columns=self._checked_labels(),
            feature_columns=self.getFeatureCols(),
            validation=self.getValidation(),
            sample_weight_col=self.getSampleWeightCol(),
            compress_sparse=self.getCompressSparseCols(),
            partitions_per_process=self.getPartitionsPerProcess(),
            verbose=self.getVerbose(),
            allow_nulls=self.getTransformationFn() is not None,
            seed=self.getRandomSeed(),
            nan_labels=self.getNanLabels(),
        ) as dataset_idx:
            facts = DataFacts(dataset_idx, *util.get_dataset_properties(dataset_idx))
            return self._fit_prepared(backend, facts, payload)

    def _fit_prepared(self, backend: Backend, facts: DataFacts, payload: bytes) -> Any:
        ranks = backend.num_processes()
        for rows, what in ((facts.train_rows, "train"), (facts.val_rows, "validate")):
            if 0 < rows < ranks:
                raise ValueError(f"{rows} row(s) are too few to {what} on {ranks} processes")
        if self.getTransformationFn() is None:
            self._check_metadata(facts.metadata)
        run_id = self.getRunId() or f"{self.run_id_prefix}_{int(time.time())}"
        job = TrainingJob.of(self, facts, run_id, self._features(facts.metadata), payload)
        path = job.store.checkpoint_path
        if path and self.getRunId():
            job.checkpoint = self._find_checkpoint(path, job.run_id)
        env = {**ARROW_POOL, **self._environment()}
        results = backend.run(self._trainer, args=(job,), env=env)
        return self._model_of(results[0], job)

    def _find_checkpoint(self, path: str, run_id: str) -> bytes | None:
        """Return the checkpoint that an earlier run of this name has left, if there is one."""
        store = self.getStore()
        return bytes(store.read(path)) if store.exists(path) else None

    def _environment(self) -> dict[str, str]:
        """Return environment variables for the processes besides those of the backend."""
        return {}

    # -- checks, before anything is written or started -----------------------------------------

    def _checked_backend(self) -> Backend:
        self._check_params()
        backend = self.getBackend()
        if backend is None:
            return SparkBackend(self.getNumProc(), verbose=self.getVerbose())
        if self.getNumProc() is not None:
            raise ValueError("give backend or num_proc, not both: the backend knows its processes")
        if not isinstance(backend, Backend):
            raise ValueError(f"backend must be a horovod.spark.common.Backend, not {backend!r}")
        return backend

    def _checked_store(self) -> Store:
        store = self.getStore()
        if not isinstance(store, Store):
            raise ValueError(
                "store is not set: give Store.create('/a/path/that/all/executors/see')"
                if store is None
                else f"store must be a horovod.spark.common.store.Store, not {store!r}"
            )
        return store

    def _checked_labels(self) -> list[str]:
        labels = self.getLabelCols()
        if not labels:
            raise ValueError("label_cols is not set: name the column(s) to predict")
        return list(labels)

    def _check_loss_weights(self) -> None:
        weights, labels = self.getLossWeights(), self._checked_labels()
        if weights is not None and len(weights) != len(labels):
            raise ValueError(
                f"there are {len(weights)} loss_weights for {len(labels)} label column(s)"
            )

    def _check_params(self) -> None:
        if self.getModel() is None:
            raise ValueError("model is not set: an estimator needs one to train")
        for name in (
            "num_proc",
            "batch_size",
            "val_batch_size",
            "epochs",
            "partitions_per_process",
            "train_steps_per_epoch",
            "validation_steps_per_epoch",
            "train_reader_num_workers",
            "val_reader_num_workers",
            "backward_passes_per_step",
        ):
            value = self.getOrDefault(name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if (self.getShufflingBufferSize() or 0) < 0:
            raise ValueError("shuffle_buffer_size must be at least 0")
        check_validation(self.getValidation())
        check_nan_labels(self.getNanLabels())

    def _feeds_columns(self) -> bool:
        """Return whether the model gets the columns as they are, so that a trial is possible."""
        return self.getTransformationFn() is None and self.getDataModule() is None

    def _trial_rows(self) -> int:
        return min(TRIAL_ROWS, int(self.getBatchSize()))

    def _check_rows(self, rows: Rows, metadata: Metadata, payload: bytes) -> None:
        """Raise ValueError if the first rows do not fit the model, before a process is started."""
        if row_count(rows):
            self._check_metadata(metadata)
            self._try_rows(rows, metadata, payload)

    def _try_rows(self, rows: Rows, metadata: Metadata, payload: bytes) -> None:
        """Raise ValueError if the model or a loss fails with these rows, if that can be tried."""

    @abstractmethod
    def _check_metadata(self, metadata: Metadata) -> None:
        """Raise ValueError if the columns do not fit the model."""

    @abstractmethod
    def _pack(self) -> bytes:
        """Pickle the model and what belongs to it; ValueError if that fails."""

    @abstractmethod
    def _model_of(self, result: Any, job: TrainingJob) -> Any:
        """Make the trained model from what rank 0 returned."""

    def _features(self, metadata: Metadata) -> list[str]:
        given = self.getFeatureCols()
        if given:
            return list(given)
        labels = self._checked_labels()
        return util.default_feature_columns(metadata, *labels, self.getSampleWeightCol())


class HorovodModel(Persistent, ModelParams, Model):
    """Base class of all trained models."""

    def transform(self, df: Any, params: Any = None) -> Any:
        """Add the predictions of the model to a DataFrame.

        Args:
            df: The DataFrame, which has the feature columns.
            params: Dict of parameters to use in place of the model's. By default there are none.

        Returns:
            The DataFrame with a column of predictions for each label.
        """
        return super().transform(df, params)

    def _transform(self, df: Any) -> Any:
        columns = self.getFeatureColumns(), self.getOutputCols()
        return transform(df, self._predictor(), *columns, self.getMetadata())

    def _predictor(self) -> Predictor:
        """Make the predictor, which is sent to the executors."""
        raise NotImplementedError
