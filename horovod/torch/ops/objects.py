"""Sending any Python object, exported to users by `horovod.torch.functions`."""

from __future__ import annotations

from typing import Any

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine import objects
from horovod.engine.arguments import set_id
from horovod.torch.ops.untraced import breaks_graph


@breaks_graph("call it outside of compiled code")
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank; what the others pass is ignored.

    Args:
        obj: Anything that can be pickled. The root gets back the very object it passed.
        root_rank: The rank whose object all ranks get.
        name: Name that tells this broadcast from others that other threads have in flight.
        process_set: The ranks that take part.

    Raises:
        ValueError: The root could not pickle its object; all ranks raise.

    Examples:
        >>> epoch = hvd.broadcast_object(epoch, root_rank=0)
    """
    return objects.broadcast_object(obj, root_rank, name or "broadcast_object", set_id(process_set))


@breaks_graph("call it outside of compiled code")
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's object, in the order of ranks.

    Args:
        obj: Anything that can be pickled.
        name: Name that tells this call from others that other threads have in flight.
        process_set: The ranks that take part.

    Raises:
        ValueError: A rank could not pickle its object; all ranks raise.
    """
    return objects.allgather_object(obj, name or "allgather_object", set_id(process_set))
