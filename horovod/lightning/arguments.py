"""What a Trainer's or Fabric's arguments mean where they ask for Horovod.

Called by `horovod.lightning.registration` in place of Lightning's own reading of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from horovod.lightning.current_device import current_accelerator
from horovod.lightning.flavours import Flavour
from horovod.lightning.options import Options

# Of the options of a strategy, those that mean the same to all of them: not Lightning's objects.
_SHARED = {"join", *(field.name for field in dataclasses.fields(Options))}


def resolved(
    arguments: dict[str, Any], flavour: Flavour, make: Any, make_accelerator: Any
) -> dict[str, Any]:
    """The arguments to replace; `make(flavour)` is the class of the strategy that is meant."""
    strategy, accelerator = arguments["strategy"], arguments["accelerator"]
    flavour.require()
    kind = make(flavour)
    if hasattr(strategy, "is_horovod"):
        # One made for the other package, or for Fabric where this is a Trainer, has the same
        # options. One of ours stays what it is: the program may hold on to it.
        if not isinstance(strategy, kind):
            given = {k: v for k, v in strategy.given.items() if k in _SHARED}
            strategy = kind(**given)
    elif str(strategy).lower() in ("horovod", "auto"):
        # An object rather than the name: Lightning need not look for the launcher then, which
        # would start MPI in a process that has mpi4py.
        strategy = kind()
    else:
        raise ValueError(
            f"accelerator='horovod' chooses strategy='horovod' as well, and strategy={strategy!r} "
            f"was given: leave one of the two out"
        )
    if isinstance(accelerator, str) and accelerator.lower() == "horovod":
        accelerator = _of_this_rank(flavour, make_accelerator)
    return {"strategy": strategy, "accelerator": accelerator}


def _of_this_rank(flavour: Flavour, make: Any) -> Any:
    """GPU, XPU or CPU: Lightning's own accelerator where it has one."""
    device = current_accelerator()
    if device is None:
        return "cpu"
    return "cuda" if device.type == "cuda" else make(flavour)()
