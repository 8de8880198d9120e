"""Communication hooks: they send something in place of gradients. Public as ``hvd.hooks``.

    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(),
                                         communication_hook=hvd.hooks.PowerSGD(4))

`FP16`, `BF16`, `PowerSGD`, `TopK` and `EightBit` are there. Write another by deriving from
`CommunicationHook`; this one has the ranks' gradients added up in double precision::

    class Double(hvd.hooks.CommunicationHook):
        def start(self, bucket):
            wide = [gradient.double() for gradient in bucket.gradients]
            wait = bucket.allreduce(wide)

            def finish():
                wait()
                for gradient, result in zip(bucket.gradients, wide):
                    gradient.copy_(result)

            return finish

Every hook must leave the same bits on all ranks, or their models drift apart. Gradients that stay
sparse do not go through a hook. The `traffic` of our hooks tells how many bytes a parameter costs.
A hook's `state_dict` differs between ranks, and is not part of the optimizer's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from horovod.torch.hooks.base import CommunicationHook, GradientBucket

if TYPE_CHECKING:
    from horovod.torch.hooks.casting import BF16, FP16
    from horovod.torch.hooks.eightbit import EightBit
    from horovod.torch.hooks.powersgd import PowerSGD
    from horovod.torch.hooks.topk import TopK

__all__ = [
    "BF16",
    "CommunicationHook",
    "EightBit",
    "FP16",
    "GradientBucket",
    "PowerSGD",
    "TopK",
]

_MODULES = {
    "BF16": "casting",
    "EightBit": "eightbit",
    "FP16": "casting",
    "PowerSGD": "powersgd",
    "TopK": "topk",
}


def __getattr__(name: str) -> Any:
    """Import a hook's module when somebody asks for the hook: few need one."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
