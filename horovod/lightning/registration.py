"""Making the name "horovod" known to Lightning, whichever is imported first.

Lightning has no entry point for strategies. So when `horovod.torch` or `horovod.lightning` is
imported, a Lightning that is there already is told at once; one that is not is noticed when it is
imported, by a finder in front of all others that finds nothing itself. Nothing here imports
Lightning, or anything else that takes time.

What is told: the names of the strategies and of the accelerator. Beyond the registries, Lightning's
connectors, which turn the arguments of a Trainer or of Fabric into objects, are given ours where
the arguments ask for Horovod: ``accelerator="horovod"`` means a strategy as well, which no registry
can express.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Any

if typing.TYPE_CHECKING:
    from horovod.lightning.flavours import Flavour

NAME = "horovod"

# The modules with the connectors. By the time that one is complete, so are the registries.
_TRAINER = ".trainer.connectors.accelerator_connector"
_FABRIC = ".connector"
_CONNECTORS = {
    f"lightning.pytorch{_TRAINER}": ("LIGHTNING", "trainer"),
    f"lightning.fabric{_FABRIC}": ("LIGHTNING", "fabric"),
    f"pytorch_lightning{_TRAINER}": ("PYTORCH_LIGHTNING", "trainer"),
    f"lightning_fabric{_FABRIC}": ("PYTORCH_LIGHTNING", "fabric"),
}


def install() -> None:
    """Register with every Lightning that is imported, and with those that will be."""
    for name in _CONNECTORS:
        module = sys.modules.get(name)
        if module is not None and _is_complete(module):
            _register(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _is_complete(module: ModuleType) -> bool:
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a connector's module, and registers when it is complete."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CONNECTORS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                _call_after(spec)
                return typing.cast("importlib.machinery.ModuleSpec", spec)
        return None


def _call_after(spec: importlib.machinery.ModuleSpec) -> None:
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        _register(module)

    loader.exec_module = execute_and_register  # type: ignore[method-assign]


def _register(module: ModuleType) -> None:
    """`module` has a connector: tell it, and the registries that it uses."""
    from horovod.lightning import flavours

    package, kind = _CONNECTORS[module.__name__]
    flavour: Flavour = getattr(flavours, package)
    if kind == "trainer":
        connector = module._AcceleratorConnector
        strategies, accelerators = module.StrategyRegistry, module.AcceleratorRegistry
        make, accelerator = flavours.trainer_strategy, flavours.accelerator
    else:
        connector = module._Connector
        strategies, accelerators = module.STRATEGY_REGISTRY, module.ACCELERATOR_REGISTRY
        make, accelerator = flavours.fabric_strategy, flavours.fabric_accelerator
    if getattr(connector.__init__, "knows_horovod", False):
        return
    note = "Horovod: gradients averaged over all ranks of the job"
    # Not the class, which takes time to make, and says so where Lightning is too old.
    strategies.register(NAME, lambda **options: make(flavour)(**options), note, override=True)
    accelerators.register(NAME, accelerator(flavour), "this rank's device", override=True)
    _teach(connector, flavour, make, accelerator)


def _teach(connector: Any, flavour: Flavour, make: Any, accelerator: Any) -> None:
    """Let this connector take ``accelerator="horovod"``, and strategies of either package."""
    original = connector.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def with_horovod(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if _asks_for_us(bound.arguments):
            from horovod.lightning.arguments import resolved

            bound.arguments.update(resolved(bound.arguments, flavour, make, accelerator))
        original(*bound.args, **bound.kwargs)

    with_horovod.knows_horovod = True  # type: ignore[attr-defined]
    connector.__init__ = with_horovod


def _asks_for_us(arguments: dict[str, Any]) -> bool:
    return any(
        (isinstance(given, str) and given.lower() == NAME) or hasattr(given, "is_horovod")
        for given in (arguments.get("strategy"), arguments.get("accelerator"))
    )
