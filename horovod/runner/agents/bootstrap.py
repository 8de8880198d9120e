"""Bring the agent's modules into a process that has no Horovod, through its stdin.

`host_agent` packs them with `pack_modules`. It sends this file with them, and the agent's command
line runs it and calls `run_agent`. Because they come from the launcher, every host runs the
launcher's version, whatever is installed there. Compiled code travels along with the source, for
hosts that have exactly the launcher's Python: hundreds may start at once, and compiling takes
longer than loading.
"""

from __future__ import annotations

import marshal
import sys

TYPE_CHECKING = False  # as in typing, whose import would delay the agent's start
if TYPE_CHECKING:
    from typing import Any

Packed = tuple[str, list[tuple[str, str, bytes]]]
"""Python's version, and each module's name, source and code."""


def pack_modules(*names: str) -> Packed:
    """Pack modules of this process for `load_modules` in another; imports come before importers."""
    from importlib.util import find_spec

    packed = []
    for name in names:
        spec = find_spec(name)
        assert spec is not None
        loader: Any = spec.loader  # its code comes from Python's cache, if there is one
        code = marshal.dumps(loader.get_code(name))
        packed.append((name, loader.get_source(name), code))
    return sys.version, packed


def load_modules(packed: Packed) -> None:
    """Make packed modules importable in this process, in their order."""
    version, modules = packed
    for name, source, code in modules:
        parts = name.split(".")
        for length in range(1, len(parts)):
            package = ".".join(parts[:length])
            if package not in sys.modules:
                sys.modules[package] = type(sys)(package)
                sys.modules[package].__path__ = []
        module = sys.modules[name] = type(sys)(name)
        if version == sys.version:
            exec(marshal.loads(code), module.__dict__)
        else:
            exec(compile(source, f"<{name}>", "exec"), module.__dict__)


def run_agent(packed: Packed, parent: int) -> None:
    """Run the agent, which is the last of the packed modules; see its `main`."""
    load_modules(packed)
    sys.modules[packed[1][-1][0]].main(parent)
