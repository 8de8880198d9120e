"""Horovod for Lightning 2: ``Trainer(strategy="horovod")`` and ``Fabric(strategy="horovod")``.

Importing this package, or `horovod.torch`, makes the names known to Lightning, now or when it is
imported later; Lightning itself is imported when something here is used that needs it.
"""

from __future__ import annotations

import importlib
import typing

from horovod.lightning import registration

__all__ = [
    "HorovodAccelerator",
    "HorovodEnvironment",
    "HorovodFabricStrategy",
    "HorovodStrategy",
    "elastic",
]

if typing.TYPE_CHECKING:
    from horovod.lightning import elastic as elastic
    from horovod.lightning.accelerator import Accelerator as HorovodAccelerator
    from horovod.lightning.environment import Environment as HorovodEnvironment
    from horovod.lightning.fabric import FabricStrategy as HorovodFabricStrategy
    from horovod.lightning.strategy import TrainerStrategy as HorovodStrategy

registration.install()


def __getattr__(name: str) -> typing.Any:
    """The public names, made for the Lightning that the program uses."""
    if name == "elastic":
        return importlib.import_module("horovod.lightning.elastic")
    if name in __all__:
        from horovod.lightning import flavours

        return flavours.public(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
