"""An extension of Griffe: classes that take their docstring from a base, `__doc__ = Base.__doc__`.

The two Keras packages share code that way. Griffe reads sources without running them, so it does
not see what the assignment does.
"""

from __future__ import annotations

import griffe


class InheritedDocstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: object) -> None:
        self._visit(pkg)

    def _visit(self, scope: griffe.Module | griffe.Class) -> None:
        for member in list(scope.members.values()):
            if member.is_alias:
                continue
            if isinstance(member, griffe.Class):
                self._inherit(member)
            if isinstance(member, (griffe.Module, griffe.Class)):
                self._visit(member)

    def _inherit(self, found: griffe.Class) -> None:
        assignment = found.members.get("__doc__")
        if not isinstance(assignment, griffe.Attribute) or found.docstring is not None:
            return
        base, _, name = str(assignment.value).rpartition(".")
        if name == "__doc__":
            original = found.resolve(base)
            module, _, class_name = original.rpartition(".")
            source = found.modules_collection[module][class_name].docstring
            if source is not None:
                found.docstring = griffe.Docstring(source.value, parent=found)
