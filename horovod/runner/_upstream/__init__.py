"""Modules that only Horovod 0.28.1 had, for programs that import more than its public API.

`horovod.runner` installs `OldModules` when it is imported. An old path such as
``horovod.runner.gloo_run`` is no file here: `table` says which module of this folder has its names.
New code never imports from this folder.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PREFIX = "horovod.runner."


class OldModules:
    """Import hook that makes the modules of `table.OLD_MODULES`, and the packages around them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load an old module. Python asks only if there is no file."""
        if not name.startswith(PREFIX):
            return None
        from horovod.runner._upstream.table import GENERATED, PACKAGES

        if name in PACKAGES:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return ModuleSpec(name, self) if name in GENERATED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module object."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with its old names."""
        from horovod.runner._upstream.table import GENERATED

        old = GENERATED.get(module.__name__)
        module.__doc__ = "Names of Horovod 0.28.1; see docs/old_names.md."
        if old is None:  # a package, which has nothing of its own
            return
        find = functools.partial(find_old_name, old.source)
        for name in old.names:
            setattr(module, name, find(name))
        vars(module)["__getattr__"] = find  # for names that are made when they are asked for

    def get_code(self, name: str) -> None:
        """Tell ``python -m`` that there is nothing to run."""


def find_old_name(source: str, name: str) -> Any:
    """Return what a name of Horovod 0.28.1 stands for, from the module that has it now."""
    from horovod.runner._upstream.table import REFUSED, refuse

    return refuse(name) if name in REFUSED else getattr(importlib.import_module(source), name)


def install() -> None:
    """Make the old modules importable."""
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.append(OldModules())
