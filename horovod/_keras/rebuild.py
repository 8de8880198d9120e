"""Turns a user's optimizer into one of a class derived from its own.

The new class has the name of the old one. When Keras saves the optimizer, its class appears to be
the old one, so that the files do not mention Horovod.
"""

from __future__ import annotations

from typing import Any

from horovod.common.logging import get_logger

logger = get_logger(__name__)

_PLAIN = (bool, int, float, str, type(None))


def derive_class(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    """Make a class from `mixin` and `base` that appears to be `base`."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        # Keras writes this class into files, and looks it up in its registries.
        "__class__": property(lambda self: base),
        **attributes,
    }
    return type(base)(base.__name__, (mixin, base), namespace)


def rebuild(optimizer: Any, cls: type) -> Any:
    """Return a new optimizer of class `cls` with the settings of `optimizer`.

    If the optimizer has a state already, or cannot be made again from its configuration, change the
    class of the optimizer itself.
    """
    if has_state(optimizer):
        return take_over(optimizer, cls)
    try:
        config = optimizer.get_config()
        rate = getattr(optimizer, "_learning_rate", None)
        if callable(rate):
            config["learning_rate"] = rate  # the schedule itself instead of its serialised form
        copy = cls.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:
        logger.warning(
            "%s cannot be made again from its get_config() (%s: %s): the optimizer itself becomes "
            "the distributed one, instead of a copy",
            cls.__name__,
            type(error).__name__,
            error,
        )
        return take_over(optimizer, cls)
    _copy_settings(optimizer, copy)
    return copy


def take_over(optimizer: Any, cls: type) -> Any:
    """Change the class of the optimizer itself to `cls`, and return the optimizer."""
    optimizer.__class__ = cls
    return optimizer


def has_state(optimizer: Any) -> bool:
    """Return whether the optimizer has been built for the variables of a model."""
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        return bool(optimizer._weights)
    return bool(getattr(optimizer, "built", False) or getattr(optimizer, "_built", False))


def _copy_settings(optimizer: Any, copy: Any) -> None:
    """Copy settings that a configuration lacks, such as `exclude_from_weight_decay`."""
    present = vars(copy)
    for name, value in vars(optimizer).items():
        if name.startswith("_self_") or name == "_is_wrapped_by_loss_scale_optimizer":
            continue  # facts about this object that TensorFlow and Keras keep in it
        if name not in present or (
            type(value) in _PLAIN and type(present[name]) in _PLAIN and present[name] != value
        ):
            object.__setattr__(copy, name, value)


class CallableList(list[Any]):
    """The `variables` of an optimizer, which scripts may also call: it used to be a method."""

    def __call__(self) -> CallableList:
        return self
