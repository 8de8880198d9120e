"""Turns the arguments of a Trainer or Fabric that ask for Horovod into objects.

`horovod.lightning.registration` calls this before Lightning reads the arguments.
"""

from __future__ import annotations

from typing import Any

from horovod.lightning.current_device import current_accelerator
from horovod.lightning.flavours import Flavour


def resolve_arguments(
    arguments: dict[str, Any], flavour: Flavour, strategy_class: Any, accelerator_class: Any
) -> dict[str, Any]:
    """Return the strategy and the accelerator with which to replace those in `arguments`.

    `strategy_class` and `accelerator_class` make the classes for a flavour.
    """
    strategy, accelerator = arguments["strategy"], arguments["accelerator"]
    flavour.require()
    kind = strategy_class(flavour)
    if hasattr(strategy, "is_horovod"):
        # A strategy made for the other package, or for Fabric where this is a Trainer, has the same
        # options, so an equal one is made. A strategy of the right class stays the same object,
        # because the program may hold a reference to it.
        if not isinstance(strategy, kind):
            strategy = kind(**strategy.given_arguments)
    elif str(strategy).lower() in ("horovod", "auto"):
        # Pass an object instead of the name: with a name Lightning would look for the launcher, and
        # that look starts MPI in a process that has mpi4py.
        strategy = kind()
    else:
        raise ValueError(
            f"accelerator='horovod' chooses strategy='horovod' as well, and strategy={strategy!r} "
            f"was given: leave one of the two out"
        )
    if isinstance(accelerator, str) and accelerator.lower() == "horovod":
        accelerator = _choose_accelerator(flavour, accelerator_class)
    return {"strategy": strategy, "accelerator": accelerator}


def _choose_accelerator(flavour: Flavour, accelerator_class: Any) -> Any:
    """Return Lightning's own accelerator for this rank's device, or ours where it has none."""
    device = current_accelerator()
    if device is None:
        return "cpu"
    return "cuda" if device.type == "cuda" else accelerator_class(flavour)()
