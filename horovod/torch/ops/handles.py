"""Integer handles of asynchronous collectives, as `poll` and `synchronize` take them.

Blocking collectives wait on the engine's own handle and never come here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from horovod.engine.request import Request
from horovod.torch.ops.untraced import breaks_graph

# Each handle's request, and the function that turns its result into what `synchronize` returns.
_pending: dict[int, tuple[Request, Callable[[Any], Any]]] = {}
_numbers = itertools.count(1)


def hand_out(request: Request, finish: Callable[[Any], Any]) -> int:
    """Return a number for `request`; `finish` turns its result into what `synchronize` returns."""
    number = next(_numbers)
    _pending[number] = request, finish
    return number


@breaks_graph("use blocking collectives, such as hvd.allreduce")
def poll(handle: int) -> bool:
    """Return whether ``synchronize(handle)`` would return at once.

    Args:
        handle: The number that the collective returned when it was started.

    Raises:
        ValueError: The handle does not exist, or was synchronised already.
    """
    try:
        return _pending[handle][0].done()
    except KeyError:
        raise ValueError(
            f"handle {handle} does not exist: it was never given out or is synchronised already"
        ) from None


@breaks_graph("use blocking collectives, such as hvd.allreduce")
def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result, once.

    Args:
        handle: The number that the collective returned when it was started.

    Returns:
        The output tensor; a tuple of them for a grouped operation; (output, received splits) for
        alltoall; None for a handle that does not exist or was synchronised already.

    Raises:
        HorovodInternalError: The operation failed.
    """
    entry = _pending.pop(handle, None)
    if entry is None:
        return None
    request, finish = entry
    return finish(request.wait())


def restart() -> None:
    """Forget all handles and number new ones from 1, because the engine starts anew."""
    global _numbers
    _pending.clear()
    _numbers = itertools.count(1)


def first(result: list[Any]) -> Any:
    return result[0]
