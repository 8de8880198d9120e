"""The module in which Horovod 0.28.1 has `HorovodBasics`; for programs that import it from here.

The class is in the engine, and is loaded, with torch, when a program asks for it. Our own code does
not.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "HorovodBasics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovod.engine.basics import HorovodBasics

    return HorovodBasics
