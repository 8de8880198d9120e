"""Horovod for Lightning 2: ``Trainer(strategy="horovod")`` and ``Fabric(strategy="horovod")``.

Importing this package or `horovod.torch` registers these names with Lightning, at once or when
Lightning is imported later. This package imports Lightning itself only when a program uses one of
its classes.
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
    """Return a public class, made for the package of Lightning that the program uses."""
    if name == "elastic":
        return importlib.import_module("horovod.lightning.elastic")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovod.lightning import accelerator, environment, fabric, flavours, strategy

    make_class = {
        "HorovodAccelerator": accelerator.accelerator_class,
        "HorovodEnvironment": environment.environment_class,
        "HorovodFabricStrategy": fabric.fabric_strategy_class,
        "HorovodStrategy": strategy.trainer_strategy_class,
    }[name]
    return make_class(flavours.preferred_flavour())
