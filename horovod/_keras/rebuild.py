"""Turning a user's optimizer into one of a class derived from its own.

The new class has the old one's name, and says that it is the old one when Keras saves it, so that
the files do not mention Horovod.
"""

from __future__ import annotations

from typing import Any

from horovod.common.logging import get_logger

logger = get_logger(__name__)

_PLAIN = (bool, int, float, str, type(None))


def derived_class(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    """A class that passes for `base`, with `mixin` in front of it."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        # What Keras writes into files and looks up in its registries.
        "__class__": property(lambda self: base),
        **attributes,
    }
    return type(base)(base.__name__, (mixin, base), namespace)


def rebuilt(optimizer: Any, cls: type) -> Any:
    """An optimizer of class `cls` with the settings of `optimizer`, and a state of its own.

    One that has a state already, or cannot be made again from its configuration, is turned into
    one of `cls` itself.
    """
    if has_state(optimizer):
        return taken_over(optimizer, cls)
    try:
        config = optimizer.get_config()
        rate = getattr(optimizer, "_learning_rate", None)
        if callable(rate):
            config["learning_rate"] = rate  # as it is, not as a file would have it
        copy = cls.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:
        logger.warning(
            "%s cannot be made again from its get_config() (%s: %s): the optimizer itself becomes "
            "the distributed one, instead of a copy",
            cls.__name__,
            type(error).__name__,
            error,
        )
        return taken_over(optimizer, cls)
    _carry_over(optimizer, copy)
    return copy


def taken_over(optimizer: Any, cls: type) -> Any:
    """The optimizer itself, of class `cls` from now on."""
    optimizer.__class__ = cls
    return optimizer


def has_state(optimizer: Any) -> bool:
    """Whether the optimizer has been used, and so belongs to the variables of a model."""
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        return bool(optimizer._weights)
    return bool(getattr(optimizer, "built", False) or getattr(optimizer, "_built", False))


def _carry_over(optimizer: Any, copy: Any) -> None:
    """Settings that the configuration does not have, such as `exclude_from_weight_decay`."""
    there = vars(copy)
    for name, value in vars(optimizer).items():
        if name.startswith("_self_") or name == "_is_wrapped_by_loss_scale_optimizer":
            continue  # what others have noted down about the object
        if name not in there or (
            type(value) in _PLAIN and type(there[name]) in _PLAIN and there[name] != value
        ):
            object.__setattr__(copy, name, value)
