"""Lightning comes as two packages with the same content: ``lightning`` and ``pytorch_lightning``.

A Trainer accepts strategies and plugins of its own package only. So the classes of this binding are
written as mixins, and the module of each mixin has a function that makes the class for one of the
packages, with `join_with_base`. This module knows the packages and imports none of the mixins.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

OLDEST = "2.5"  # the oldest version that the tests pass with


@dataclass(frozen=True)
class Flavour:
    """One of the two packages: the name that pip knows, and the modules with Trainer and Fabric."""

    distribution: str
    pytorch: str
    fabric: str

    def trainer_part(self, module: str) -> Any:
        """Import a module of the package that has the Trainer."""
        return importlib.import_module(f"{self.pytorch}.{module}")

    def fabric_part(self, module: str) -> Any:
        """Import a module of the package that has Fabric."""
        return importlib.import_module(f"{self.fabric}.{module}")

    def version(self) -> str:
        """Return the version of the package, installed or merely on the path."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:  # e.g. a checkout on the path
            return str(importlib.import_module(self.pytorch.partition(".")[0]).__version__)

    def require(self) -> None:
        """Raise ImportError if the package is older than this binding supports."""
        version = self.version()
        if Version(version) < Version(OLDEST):
            raise ImportError(
                f"Horovod needs {self.distribution} {OLDEST} or newer, and this is {version}: "
                f"pip install --upgrade '{self.distribution}>={OLDEST}'"
            )


LIGHTNING = Flavour("lightning", "lightning.pytorch", "lightning.fabric")
PYTORCH_LIGHTNING = Flavour("pytorch-lightning", "pytorch_lightning", "lightning_fabric")
FLAVOURS = (LIGHTNING, PYTORCH_LIGHTNING)


def preferred_flavour() -> Flavour:
    """Return the package that the program has imported, or else one that is installed.

    Raises:
        ImportError: Neither package is installed.
    """
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


def join_with_base(name: str, mixin: type, base: type, flavour: Flavour) -> Any:
    """Make a class of this binding from a mixin of ours and a base class of the package."""
    members = {"__module__": "horovod.lightning", "__doc__": mixin.__doc__, "flavour": flavour}
    return type(base)(name, (mixin, base), members)
