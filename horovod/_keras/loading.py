"""`load_model`, which loads a saved model and makes its optimizer a distributed one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod._keras.flavour import is_tf_keras
from horovod._keras.optimizer import distribute_in_place, is_distributed
from horovod.common.logging import get_logger
from horovod.common.optimizer_options import OptimizerOptions

logger = get_logger(__name__)


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: dict[str, Any] | None,
    compression: Any,
) -> Any:
    """Load the model in `filepath`; its optimizer keeps its saved state and becomes distributed."""
    optimizers = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath, custom_objects={**optimizers, **(custom_objects or {})}
    )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        if _has_no_variables(optimizer, model):
            logger.warning("the state of the optimizer in %s is lost to Keras 3", filepath)
            optimizer = type(optimizer).from_config(optimizer.get_config())
        model.optimizer = distribute_in_place(optimizer, OptimizerOptions(compression=compression))
    return model


def _has_no_variables(optimizer: Any, model: Any) -> bool:
    """Return whether the optimizer was built for no variables, as Keras 3 does for .h5 files.

    Such an optimizer cannot take a step.
    """
    return (
        not is_tf_keras(optimizer)
        and optimizer.built
        and not optimizer._trainable_variables
        and bool(model.trainable_variables)
    )
