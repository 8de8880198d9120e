"""The module in which Horovod 0.28.1 has `HorovodBasics`; for programs that import it from here.

The class is in the engine, which is above this layer, and loads torch. So `horovod` itself, which
is above all layers, says how to find it, and that happens when a program asks for the class. Our
own code does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

find_class: Callable[[], Any] | None = None
"""Returns `HorovodBasics`; `horovod` sets it when it is imported."""


def __getattr__(name: str) -> Any:
    if name != "HorovodBasics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    assert find_class is not None, "importing this module has imported `horovod`"
    return find_class()
