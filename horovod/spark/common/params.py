"""The parameters of estimators and models, each with its accessors, as Spark ML wants them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

Class = TypeVar("Class", bound=type)

_ANY = TypeConverters.identity
_INT = TypeConverters.toInt
_BOOL = TypeConverters.toBoolean
_STRING = TypeConverters.toString


def _strings(value: Any) -> list[str]:
    """Return names of columns as a list; a single name becomes a list, too."""
    return [value] if isinstance(value, str) else TypeConverters.toListString(value)


@dataclass(frozen=True)
class Spec:
    """One parameter: name, default, description, converter, and the end of its accessors' names."""

    name: str
    default: Any
    doc: str
    convert: Callable[[Any], Any] = _ANY
    accessor: str | None = None

    @property
    def suffix(self) -> str:
        return self.accessor or "".join(part.title() for part in self.name.split("_"))


def declare(*specs: Spec) -> Callable[[Class], Class]:
    """Give a class of `Params` these parameters, a setter and a getter for each."""

    def decorate(cls: Class) -> Class:
        for spec in specs:
            setattr(cls, spec.name, Param(Params._dummy(), spec.name, spec.doc, spec.convert))
            for name, accessor in (("set", _setter(spec)), ("get", _getter(spec))):
                if name + spec.suffix not in vars(cls):  # the class may have its own
                    setattr(cls, name + spec.suffix, accessor)
        inherited = getattr(cls, "_specs", {})
        cls._specs = {**inherited, **{spec.name: spec for spec in specs}}  # type: ignore[attr-defined]
        return cls

    return decorate


def _setter(spec: Spec) -> Callable[[Any, Any], Any]:
    def setter(self: Any, value: Any) -> Any:
        return self._set(**{spec.name: value})

    setter.__name__ = setter.__qualname__ = f"set{spec.suffix}"
    text = f"{spec.doc[0].upper()}{spec.doc[1:]}."
    setter.__doc__ = f"Set `{spec.name}`.\n\nArgs:\n    value: {text}"
    return setter


def _getter(spec: Spec) -> Callable[[Any], Any]:
    def getter(self: Any) -> Any:
        return self.getOrDefault(spec.name)

    getter.__name__ = getter.__qualname__ = f"get{spec.suffix}"
    getter.__doc__ = f"Return `{spec.name}`: {spec.doc}."
    return getter


class DeclaredParams(Params):
    """Parameters with defaults, set from keyword arguments; None leaves the default."""

    _specs: ClassVar[dict[str, Spec]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**{spec.name: copy.copy(spec.default) for spec in self._specs.values()})

    def _set(self, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if value is None and self.hasParam(name):
                self.clear(self.getParam(name))  # converters do not understand None
                if self.getOrDefault(name) is not None:
                    self._paramMap[self.getParam(name)] = None
                continue
            try:
                super()._set(**{name: value})
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}={value!r}: {error}") from None
        return self

    def _set_given(self, given: dict[str, Any]) -> Any:
        """Set the parameters that a constructor was given."""
        return self._set(**{name: value for name, value in given.items() if value is not None})


@declare(
    Spec("num_proc", None, "how many processes train; all slots of the cluster if None", _INT),
    Spec("data_module", None, "the DataModule class that reads the data"),
    Spec("model", None, "the model to train"),
    Spec("backend", None, "the Backend that runs the training; excludes num_proc"),
    Spec("store", None, "the Store for data, checkpoints and logs"),
    Spec("optimizer", None, "the optimizer"),
    Spec("loss", None, "the loss function, or a list with one for each label"),
    Spec("loss_weights", None, "how much the loss of each label counts"),
    Spec("sample_weight_col", None, "the column with the weight of each row", _STRING),
    Spec("metrics", [], "the metrics to compute"),
    Spec("feature_cols", None, "the columns the model is fed with; all but labels", _strings),
    Spec("label_cols", None, "the columns to predict", _strings),
    Spec("continuous_cols", None, "the feature columns that are numbers", _strings),
    Spec("categorical_cols", None, "the feature columns that are category indices", _strings),
    Spec("validation", None, "the fraction of rows to validate with, or a column that marks them"),
    Spec("gradient_compression", None, "the compression of gradients: hvd.Compression.fp16"),
    Spec("compress_sparse_cols", False, "whether to keep sparse vectors sparse on disk", _BOOL),
    Spec("batch_size", 32, "rows in a batch of one process", _INT),
    Spec("val_batch_size", None, "rows in a batch of validation; batch_size if None", _INT),
    Spec("epochs", 1, "how many epochs to train", _INT),
    Spec("verbose", 1, "how much is printed; 0 is nothing", _INT),
    Spec("callbacks", [], "the callbacks"),
    Spec("random_seed", None, "the seed of shuffling, of splitting and of the framework", _INT),
    Spec(
        "shuffle_buffer_size",
        None,
        "rows to shuffle among; deprecated: set shuffle",
        _INT,
        "ShufflingBufferSize",
    ),
    Spec("shuffle", True, "whether to shuffle the training rows", _BOOL),
    Spec("partitions_per_process", 10, "Parquet files for each process", _INT),
    Spec("run_id", None, "the name of this run; a checkpoint of that name is resumed", _STRING),
    Spec("train_steps_per_epoch", None, "batches of an epoch, if not all rows", _INT),
    Spec("validation_steps_per_epoch", None, "batches of a validation, if not all rows", _INT),
    Spec("transformation_fn", None, "makes a pandas DataFrame of a pandas DataFrame of rows"),
    Spec("transformation_edit_fields", None, "(name, type, shape, nullable) of changed columns"),
    Spec("transformation_removed_fields", None, "columns that are dropped then", _strings),
    Spec("train_reader_num_workers", 2, "threads that read", _INT, "TrainReaderNumWorker"),
    Spec("val_reader_num_workers", 2, "threads that read", _INT, "ValReaderNumWorker"),
    Spec("reader_pool_type", "thread", "what the readers are; threads, whatever is set", _STRING),
    Spec("label_shapes", None, "the shape of each label; -1 stands for the batch"),
    Spec("inmemory_cache_all", False, "whether ranks keep all rows", _BOOL, "InMemoryCacheAll"),
    Spec("disk_cache", True, "whether ranks keep decoded rows on their local disks", _BOOL),
    Spec("use_gpu", True, "whether to train on GPUs where there are any", _BOOL),
    Spec("mp_start_method", None, "how reader processes start; readers are threads", _STRING),
    Spec("backward_passes_per_step", 1, "batches whose gradients are added up for a step", _INT),
    Spec("nan_labels", "refuse", "what NaN in a label does: refuse, drop or keep", _STRING),
    Spec("tensorflow_dataset_prefetch_buffer_size", 0, "batches TensorFlow reads ahead", _INT),
)
class EstimatorParams(DeclaredParams):
    """The parameters of all estimators."""

    def setShufflingBufferSize(self, value: int) -> Any:
        """Set the number of rows to shuffle among, or 0 for none. Deprecated: use `setShuffle`."""
        warnings.warn(
            "shuffle_buffer_size is deprecated: the buffer has a size by itself; "
            "setShuffle(False) turns shuffling off",
            DeprecationWarning,
            stacklevel=2,
        )
        return self._set(shuffle_buffer_size=value)


@declare(
    Spec("history", None, "what each epoch of the training came to"),
    Spec("model", None, "the trained model"),
    Spec("feature_columns", None, "the columns the model is fed with", _strings),
    Spec("label_columns", None, "the columns it predicts", _strings),
    Spec("run_id", None, "the name of the run that trained it", _STRING),
    Spec("outputCols", None, "the columns that predictions go to", _strings, "OutputCols"),
    Spec("metadata", None, "types and shapes of the columns it was trained with"),
)
class ModelParams(DeclaredParams):
    """The parameters of all models."""

    def setLabelColoumns(self, value: list[str]) -> Any:
        """Do what `setLabelColumns` does; Horovod 0.28.1 spells it this way."""
        return self._set(label_columns=value)

    def getOutputCols(self) -> list[str]:
        """Return the names of the columns of predictions."""
        given = self.getOrDefault("outputCols")
        labels = self.getOrDefault("label_columns") or []
        return list(given) if given else [f"{label}__output" for label in labels]
