"""Lightning comes as two packages with the same content: ``lightning`` and ``pytorch_lightning``.

A Trainer accepts strategies and plugins of its own package only, so the classes of this binding are
written as mixins, and made here for a package by joining them with its base classes. Called by
`horovod.lightning.registration`, and for ``from horovod.lightning import HorovodStrategy``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

OLDEST = "2.5"  # the first that the tests have passed with


@dataclass(frozen=True)
class Flavour:
    """One of the two packages."""

    distribution: str
    pytorch: str
    fabric: str

    def trainer_part(self, module: str) -> Any:
        """A module of the package that has the Trainer."""
        return importlib.import_module(f"{self.pytorch}.{module}")

    def fabric_part(self, module: str) -> Any:
        """A module of the package that has Fabric."""
        return importlib.import_module(f"{self.fabric}.{module}")

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:  # e.g. a checkout on the path
            return str(importlib.import_module(self.pytorch.partition(".")[0]).__version__)

    def require(self) -> None:
        """ImportError if it is older than what this binding knows."""
        found = self.version()
        if Version(found) < Version(OLDEST):
            raise ImportError(
                f"Horovod needs {self.distribution} {OLDEST} or newer, and this is {found}: "
                f"pip install --upgrade '{self.distribution}>={OLDEST}'"
            )


LIGHTNING = Flavour("lightning", "lightning.pytorch", "lightning.fabric")
PYTORCH_LIGHTNING = Flavour("pytorch-lightning", "pytorch_lightning", "lightning_fabric")
FLAVOURS = (LIGHTNING, PYTORCH_LIGHTNING)


def preferred() -> Flavour:
    """The package that the program uses; if that cannot be told yet, one that is installed."""
    for flavour in FLAVOURS:
        if sys.modules.get(flavour.pytorch) is not None:
            return flavour
    for flavour in FLAVOURS:
        if importlib.util.find_spec(flavour.pytorch.partition(".")[0]) is not None:
            return flavour
    raise ImportError(
        "horovod.lightning needs Lightning, which is not installed: "
        "pip install 'horovod[lightning]'"
    )


def public(name: str) -> Any:
    """A class of this binding, for the package that the program uses."""
    maker = {
        "HorovodStrategy": trainer_strategy,
        "HorovodFabricStrategy": fabric_strategy,
        "HorovodEnvironment": environment,
        "HorovodAccelerator": accelerator,
    }[name]
    return maker(preferred())


@functools.cache
def trainer_strategy(flavour: Flavour) -> Any:
    """The strategy for this package's Trainer.

    It derives from the strategy for DistributedDataParallel because Lightning asks for that where
    it means "each process has the whole model", for example before it takes compiled modules.
    """
    from horovod.lightning.strategy import TrainerStrategy

    flavour.require()
    base = flavour.trainer_part("strategies").DDPStrategy
    return _joined("HorovodStrategy", TrainerStrategy, base, flavour)


@functools.cache
def fabric_strategy(flavour: Flavour) -> Any:
    """The strategy for this package's Fabric."""
    from horovod.lightning.fabric import FabricStrategy

    flavour.require()
    base = flavour.fabric_part("strategies").ParallelStrategy
    return _joined("HorovodFabricStrategy", FabricStrategy, base, flavour)


@functools.cache
def environment(flavour: Flavour) -> Any:
    """The cluster environment, for Trainer and Fabric."""
    from horovod.lightning.environment import Environment

    base = flavour.fabric_part("plugins.environments").ClusterEnvironment
    return _joined("HorovodEnvironment", Environment, base, flavour)


@functools.cache
def accelerator(flavour: Flavour) -> Any:
    """The accelerator of this rank where Lightning has none, for the Trainer."""
    from horovod.lightning.accelerator import Accelerator

    base = flavour.trainer_part("accelerators.accelerator").Accelerator
    return _joined("HorovodAccelerator", Accelerator, base, flavour)


@functools.cache
def fabric_accelerator(flavour: Flavour) -> Any:
    """The same for Fabric, which does not import the Trainer."""
    from horovod.lightning.accelerator import Accelerator

    base = flavour.fabric_part("accelerators.accelerator").Accelerator
    return _joined("HorovodAccelerator", Accelerator, base, flavour)


@functools.cache
def commit_callback(flavour: Flavour) -> Any:
    """The callback for elastic training."""
    from horovod.lightning.elastic.callback import Commits

    base = flavour.trainer_part("callbacks").Callback
    return _joined("CommitCallback", Commits, base, flavour)


def _joined(name: str, mixin: type, base: type, flavour: Flavour) -> Any:
    members = {"__module__": "horovod.lightning", "__doc__": mixin.__doc__, "flavour": flavour}
    return type(base)(name, (mixin, base), members)
