"""Sending any Python object.

Exported to users by `horovod.torch.functions`. Objects travel as cloudpickle between ranks that
have authenticated each other; only the user's own objects are pickled.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.runtime import runtime
from horovod.torch.allgather_ops import allgather
from horovod.torch.broadcast_ops import broadcast_

Tensor = torch.Tensor

_UNPICKLABLE = -1  # sent in place of an object's size, so that nobody waits for its bytes


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank; what the others pass is ignored.

    The root gets back the very object it passed. Use `name` to have several broadcasts of objects
    in flight at once, from several threads.
    """
    name = name or "broadcast_object"
    is_root = runtime.topology.rank == root_rank
    payload = failure = None
    if is_root:
        payload, failure = _pickled(obj)
    size = torch.tensor([_UNPICKLABLE if payload is None else len(payload)])
    broadcast_(size, root_rank, f"{name}.sz", process_set)
    if failure is not None:
        raise failure
    num_bytes = int(size)
    if num_bytes == _UNPICKLABLE:
        raise ValueError(f"rank {root_rank} could not pickle the object to broadcast")
    if payload is None:
        payload = bytearray(num_bytes)
    broadcast_(torch.frombuffer(payload, dtype=torch.uint8), root_rank, f"{name}.t", process_set)
    return obj if is_root else pickle.loads(payload)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in the order of ranks."""
    name = name or "allgather_object"
    payload, failure = _pickled(obj)
    size = torch.tensor([_UNPICKLABLE if payload is None else len(payload)])
    sizes = allgather(size, f"{name}.sz", process_set).tolist()
    if failure is not None:
        raise failure
    if _UNPICKLABLE in sizes:
        assert process_set.ranks is not None
        rank = process_set.ranks[sizes.index(_UNPICKLABLE)]
        raise ValueError(f"rank {rank} could not pickle its object")
    mine = torch.frombuffer(payload, dtype=torch.uint8)
    everything = allgather(mine, f"{name}.t", process_set)
    return [pickle.loads(_content(part)) for part in everything.split(sizes)]


def _pickled(obj: Any) -> tuple[bytearray | None, Exception | None]:
    """The object as writable bytes, or why it cannot be."""
    import cloudpickle  # here, because importing it takes longer than the rest of this module

    buffer = io.BytesIO()
    try:
        cloudpickle.dump(obj, buffer)
    except Exception as error:
        return None, error
    return bytearray(buffer.getbuffer()), None


def _content(tensor: Tensor) -> bytearray:
    """The bytes of a uint8 tensor."""
    content = bytearray(tensor.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(tensor)
    return content
