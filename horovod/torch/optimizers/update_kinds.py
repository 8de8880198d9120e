"""Which tensors an optimizer's update looks at together: elements alone, a parameter, or more.

That decides how its work can be divided. An update that treats each element by itself may be made
slice by slice; one that needs a whole parameter (Muon makes a matrix orthogonal, Adafactor keeps
sums of rows and columns) is made by one rank for each parameter; one that needs all parameters at
once (LBFGS) cannot be divided. Used by `horovod.torch.optimizers.checks` and
`horovod.torch.optimizers.sharded`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class UpdateKind(Enum):
    """How much of the parameters an update needs at once."""

    ELEMENTWISE = "each element by itself"
    TENSORWISE = "each parameter by itself"
    UNKNOWN = "several parameters together, as far as is known here"


# The modules in which torch has optimizers of the first two kinds.
_KINDS = {
    **{
        f"torch.optim.{module}": UpdateKind.ELEMENTWISE
        for module in (
            "adadelta",
            "adagrad",
            "adam",
            "adamax",
            "adamw",
            "asgd",
            "nadam",
            "radam",
            "rmsprop",
            "rprop",
            "sgd",
        )
    },
    "torch.optim._adafactor": UpdateKind.TENSORWISE,
    "torch.optim._muon": UpdateKind.TENSORWISE,
}


def class_of(optimizer: Any) -> Any:
    """Return the optimizer's class without what Horovod adds to it."""
    return next(k for k in type(optimizer).__mro__ if not k.__module__.startswith("horovod."))


def kind_of(optimizer: Any) -> UpdateKind:
    """Return the kind of an optimizer of torch, or of one whose class has an attribute for it."""
    kind = class_of(optimizer)
    if getattr(kind, "elementwise", False):
        return UpdateKind.ELEMENTWISE
    if getattr(kind, "tensorwise", False):
        return UpdateKind.TENSORWISE
    return _KINDS.get(kind.step.__module__, UpdateKind.UNKNOWN)
