"""What every docstring of the public API says: what it does, and what each parameter is for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

API = Path(__file__).resolve().parents[2] / "docs" / "api"
FREE = {"self", "cls", "args", "kwargs"}
METHODS = (classmethod, staticmethod)


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and classes of a module, with the methods that its classes define here."""
    for name in module.__all__:
        value = getattr(module, name)
        if not inspect.isclass(value) and not callable(value):
            continue
        if not getattr(value, "__module__", "").startswith("horovod"):
            continue
        yield name, value
        for own, member in vars(value).items() if inspect.isclass(value) else ():
            is_method = inspect.isfunction(member) or isinstance(member, METHODS)
            if is_method and not own.startswith("_"):
                yield f"{name}.{own}", getattr(value, own)


def problems(module: ModuleType, *, listed: bool = False) -> list[str]:
    """Names without a docstring, and parameters that theirs does not mention.

    With `listed` a parameter must stand in a list of arguments; a word about it is not enough.
    """
    found = []
    for name, value in public(module):
        text = inspect.getdoc(value) or ""
        if len(text) < 15:
            found.append(f"{name} has no docstring")
            continue
        if inspect.isclass(value) and issubclass(value, BaseException):
            continue  # Python knows no parameters of those without an __init__
        parameters = set(inspect.signature(value).parameters) - FREE
        # Ray adds some of its own to the methods of actors.
        for parameter in (each for each in parameters if not each.startswith("_")):
            # "name: what it is" in a list of arguments, or `name`
            pattern = rf"^\s+\*{{0,2}}{parameter}: \S" + ("" if listed else f"|`{parameter}`")
            if not re.search(pattern, text, re.MULTILINE):
                found.append(f"{name} does not mention {parameter}")
    return found


def missing_in_reference(module: ModuleType, page: str) -> set[str]:
    """Functions and classes that the page of the API reference does not have."""
    text = (API / "index.md").read_text() + (API / f"{page}.md").read_text()
    shown = {line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    return {name for name, _ in public(module) if "." not in name} - shown
