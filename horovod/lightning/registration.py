"""Registers the name "horovod" with Lightning, which may be imported before Horovod or after it.

Lightning has no entry point for strategies. So `horovod.torch` and `horovod.lightning` call
`install` when they are imported. It registers with a Lightning that is imported already, and it
puts a finder before all others in `sys.meta_path`, which notices when Lightning is imported later.
Nothing here imports Lightning, or anything else that takes time, before that.

The names of the strategies and of the accelerator go into Lightning's registries. In addition
Lightning's connectors, which turn the arguments of a Trainer or of Fabric into objects, get our
objects where the arguments ask for Horovod: ``accelerator="horovod"`` chooses a strategy as well,
which no registry can express.
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

# The modules with the connectors. When such a module is complete, the registries are complete too.
_TRAINER = ".trainer.connectors.accelerator_connector"
_FABRIC = ".connector"
_CONNECTORS = {
    f"lightning.pytorch{_TRAINER}": ("LIGHTNING", "trainer"),
    f"lightning.fabric{_FABRIC}": ("LIGHTNING", "fabric"),
    f"pytorch_lightning{_TRAINER}": ("PYTORCH_LIGHTNING", "trainer"),
    f"lightning_fabric{_FABRIC}": ("PYTORCH_LIGHTNING", "fabric"),
}


def install() -> None:
    """Register with every Lightning that is imported already, or will be imported later."""
    for name in _CONNECTORS:
        module = sys.modules.get(name)
        if module is not None and _is_complete(module):
            _register(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _is_complete(module: ModuleType) -> bool:
    """Return whether the import of the module has finished."""
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a connector's module, and registers once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CONNECTORS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                _register_after_import(spec)
                return typing.cast("importlib.machinery.ModuleSpec", spec)
        return None


def _register_after_import(spec: importlib.machinery.ModuleSpec) -> None:
    """Let the loader of a module register Horovod once it has executed the module."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        _register(module)

    loader.exec_module = execute_and_register  # type: ignore[method-assign]


def _register(module: ModuleType) -> None:
    """Register with the connector in `module`, and with the registries that it uses."""
    from horovod.lightning import accelerator, flavours

    package, kind = _CONNECTORS[module.__name__]
    flavour: Flavour = getattr(flavours, package)
    if kind == "trainer":
        connector = module._AcceleratorConnector
        strategies, accelerators = module.StrategyRegistry, module.AcceleratorRegistry
        accelerator_class = accelerator.accelerator_class
    else:
        connector = module._Connector
        strategies, accelerators = module.STRATEGY_REGISTRY, module.ACCELERATOR_REGISTRY
        accelerator_class = accelerator.fabric_accelerator_class
    strategy_class = functools.partial(_strategy_class, kind)
    if getattr(connector.__init__, "knows_horovod", False):
        return
    note = "Horovod: gradients averaged over all ranks of the job"
    # Register a function instead of the class: making the class takes time, and raises an error
    # where Lightning is too old.
    strategies.register(
        NAME, lambda **options: strategy_class(flavour)(**options), note, override=True
    )
    accelerators.register(NAME, accelerator_class(flavour), "this rank's device", override=True)
    _patch_connector(connector, flavour, strategy_class, accelerator_class)


def _strategy_class(kind: str, flavour: Flavour) -> Any:
    from horovod.lightning import fabric, strategy

    if kind == "trainer":
        return strategy.trainer_strategy_class(flavour)
    return fabric.fabric_strategy_class(flavour)


def _patch_connector(
    connector: Any, flavour: Flavour, strategy_class: Any, accelerator_class: Any
) -> None:
    """Let this connector take ``accelerator="horovod"``, and strategies of either package."""
    original = connector.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def with_horovod(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if _requests_horovod(bound.arguments):
            bound.arguments.update(
                _resolve_arguments(bound.arguments, flavour, strategy_class, accelerator_class)
            )
        original(*bound.args, **bound.kwargs)

    with_horovod.knows_horovod = True  # type: ignore[attr-defined]
    connector.__init__ = with_horovod


def _requests_horovod(arguments: dict[str, Any]) -> bool:
    """Return whether the strategy or the accelerator is Horovod's, by name or as an object."""
    return any(
        (isinstance(given, str) and given.lower() == NAME) or hasattr(given, "is_horovod")
        for given in (arguments.get("strategy"), arguments.get("accelerator"))
    )


def _resolve_arguments(
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
    elif str(strategy).lower() in (NAME, "auto"):
        # Pass an object instead of the name: with a name Lightning would look for the launcher, and
        # that look starts MPI in a process that has mpi4py.
        strategy = kind()
    else:
        raise ValueError(
            f"accelerator='horovod' chooses strategy='horovod' as well, and strategy={strategy!r} "
            f"was given: leave one of the two out"
        )
    if isinstance(accelerator, str) and accelerator.lower() == NAME:
        accelerator = _choose_accelerator(flavour, accelerator_class)
    return {"strategy": strategy, "accelerator": accelerator}


def _choose_accelerator(flavour: Flavour, accelerator_class: Any) -> Any:
    """Return Lightning's own accelerator for this rank's device, or ours where it has none."""
    from horovod.lightning.accelerator import current_accelerator

    device = current_accelerator()
    if device is None:
        return "cpu"
    return "cuda" if device.type == "cuda" else accelerator_class(flavour)()
