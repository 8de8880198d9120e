"""Sending any Python object: what the object helpers of all bindings do.

Objects travel as cloudpickle between ranks that have authenticated each other; only the user's own
objects are pickled.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import torch

from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime

_SIZE = struct.Struct("<q")  # size of the pickled object that follows
_UNPICKLABLE = -1  # stands for the size, so that nobody waits for an object
_HEAD = 4096
"""Bytes of the first message of a broadcast. Most objects, such as counters, need no second one."""


def broadcast_object(obj: Any, root_rank: int, name: str, process_set_id: int) -> Any:
    """Return the root's object on every rank; the root gets back the very object it passed."""
    runtime.group(process_set_id)  # raises if there is no such set
    is_root = runtime.topology.rank == root_rank
    parcel, failure = _pack(obj) if is_root else (bytearray(), None)
    head = parcel[:_HEAD].ljust(_HEAD, b"\0")
    _broadcast(torch.frombuffer(head, dtype=torch.uint8), root_rank, f"{name}.sz", process_set_id)
    if failure is not None:
        raise failure
    (size,) = _SIZE.unpack_from(head)
    if size == _UNPICKLABLE:
        raise ValueError(f"rank {root_rank} could not pickle the object to broadcast")
    if not is_root:
        parcel = head + bytearray(max(0, _SIZE.size + size - _HEAD))
    if len(parcel) > _HEAD:
        rest = torch.frombuffer(parcel, dtype=torch.uint8, offset=_HEAD)
        _broadcast(rest, root_rank, f"{name}.t", process_set_id)
    return obj if is_root else pickle.loads(memoryview(parcel)[_SIZE.size :])


def allgather_object(obj: Any, name: str, process_set_id: int) -> list[Any]:
    """Return every rank's object, in the order of ranks."""
    parcel, failure = _pack(obj)
    mine = torch.frombuffer(parcel, dtype=torch.uint8)
    everything = _allgather(mine, f"{name}.t", process_set_id).numpy().data
    if failure is not None:
        raise failure
    objects: list[Any] = []
    start = 0
    for rank in runtime.process_set_ranks(process_set_id):
        (size,) = _SIZE.unpack_from(everything, start)
        if size == _UNPICKLABLE:
            raise ValueError(f"rank {rank} could not pickle its object")
        start += _SIZE.size
        objects.append(pickle.loads(everything[start : start + size]))
        start += size
    return objects


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str, process_set_id: int) -> None:
    collective = Collective(Kind.BROADCAST, name, process_set_id, root_rank=root_rank)
    runtime.submit(collective, [tensor], [tensor], background=False).wait()


def _allgather(tensor: torch.Tensor, name: str, process_set_id: int) -> torch.Tensor:
    gathered: torch.Tensor
    collective = Collective(Kind.ALLGATHER, name, process_set_id)
    (gathered,) = runtime.submit(collective, [tensor], background=False).wait()
    return gathered


def _pack(obj: Any) -> tuple[bytearray, Exception | None]:
    """Return the pickled object, writable and behind its size, or why it cannot be pickled."""
    import cloudpickle  # here, because importing it takes longer than the rest of this module

    buffer = io.BytesIO(bytes(_SIZE.size))
    buffer.seek(_SIZE.size)
    try:
        cloudpickle.dump(obj, buffer)
    except Exception as error:
        return bytearray(_SIZE.pack(_UNPICKLABLE)), error
    parcel = bytearray(buffer.getbuffer())
    _SIZE.pack_into(parcel, 0, len(parcel) - _SIZE.size)
    return parcel, None
