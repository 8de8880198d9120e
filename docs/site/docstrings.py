"""An extension of Griffe: docstrings that stand elsewhere.

Classes take them from a base, `__doc__ = Base.__doc__`, and functions from another function,
`@documented_as(other)`. The two Keras packages share code that way. Griffe reads sources without
running them, so it does not see what these do.
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
            other = self._other(member)
            if other is not None and member.docstring is None:
                module, _, name = scope.resolve(other).rpartition(".")
                source = scope.modules_collection[module][name].docstring
                if source is not None:
                    member.docstring = griffe.Docstring(source.value, parent=member)
            if isinstance(member, (griffe.Module, griffe.Class)):
                self._visit(member)

    def _other(self, found: griffe.Object) -> str | None:
        """Return the name of the class or function that has the docstring of `found`."""
        if isinstance(found, griffe.Class) and "__doc__" in found.members:
            name, _, attribute = str(found.members["__doc__"].value).rpartition(".")
            return name if attribute == "__doc__" else None
        for decorator in found.decorators if isinstance(found, griffe.Function) else ():
            name, _, argument = str(decorator.value).partition("(")
            if name == "documented_as":
                return argument.rstrip(")")
        return None
