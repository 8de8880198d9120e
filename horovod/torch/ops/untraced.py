"""Marks for functions that torch.compile must not look into.

`untraced` and `calls_traced` mark parts of the optimizers. `breaks_graph` marks functions that
users call and that are never a part of a graph: asynchronous collectives, `join`, objects.
`leaves_graph` marks functions in modules that programs without torch.compile import, too.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")

# Older versions of torch say in general words that the graph breaks, and where.
_TAKES_REASONS = "reason" in inspect.signature(torch.compiler.disable).parameters


def untraced(function: F) -> F:
    """Let compiled code call the function as it is; what it calls is not compiled either.

    This is for functions that talk to other ranks. It loads the compiler, so modules that every
    program imports do without.
    """
    marked = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return cast("F", marked)


def calls_traced(function: F) -> F:
    """Let compiled code call the function as it is; what it calls is compiled unless marked.

    This is for functions that call both untraced functions and torch's own. If the compiler looked
    into one, each call that ends a graph would do so in the caller and once more in the function.
    """
    marked = torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
    return cast("F", marked)


def breaks_graph(instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function of `hvd` as `leaves_graph` does.

    Args:
        instead: Advice for users who may not leave the graph (`fullgraph=True`). The error says it
            after the name of the function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        what = f"hvd.{function.__name__} cannot be traced with fullgraph=True"
        return leaves_graph(f"{what}: {instead}")(function)

    return decorate


def leaves_graph(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let compiled code leave its graph for a function, as `untraced` does, but load no compiler.

    Args:
        reason: What the error says where that is not allowed (`fullgraph=True`).
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        marked: dict[str, Callable[P, R]] = {}  # the function with torch's own mark, once needed

        @functools.wraps(function)
        def outside(*args: P.args, **kwargs: P.kwargs) -> R:
            if not marked:
                if is_compiling():
                    _leave_graph(reason)
                elif not _has_compiled():
                    return function(*args, **kwargs)
                marked["it"] = _disabled(function, reason)
            return marked["it"](*args, **kwargs)

        # torch.compile counts how often it has compiled a code object, and gives up at some number:
        # each function gets one of its own.
        code = outside.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
        outside.__code__ = code  # type: ignore[attr-defined]
        return outside

    return decorate


def _has_compiled() -> bool:
    """Return whether torch.compile has done anything in this process.

    If not, a function needs no mark, which costs microseconds in every call.
    """
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return compiler is not None and getattr(compiler, "FRAME_COUNTER", 1) > 0


def _leave_graph(reason: str) -> None:
    """End the graph that is being made; where that is not allowed, raise with the reason."""
    if _TAKES_REASONS:
        torch._dynamo.graph_break(msg=reason)
    else:
        torch._dynamo.graph_break()


def _disabled(function: Callable[P, R], reason: str) -> Callable[P, R]:
    """Return the function with torch's own mark, by which torch.compile leaves it alone."""
    disable: Any = torch.compiler.disable
    marked = disable(function, reason=reason) if _TAKES_REASONS else disable(function)
    return cast("Callable[P, R]", marked)
