"""Sending any Python object: what the object helpers of all bindings do.

Objects travel as cloudpickle between ranks that have authenticated each other; only the user's own
objects are pickled.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime

_UNPICKLABLE = -1  # sent in place of an object's size, so that nobody waits for its bytes


def broadcast_object(obj: Any, root_rank: int, name: str, process_set_id: int) -> Any:
    """Return the root's object on every rank; the root gets back the very object it passed."""
    runtime.group(process_set_id)  # says so where there is none
    is_root = runtime.topology.rank == root_rank
    payload = failure = None
    if is_root:
        payload, failure = _pickled(obj)
    size = torch.tensor([_UNPICKLABLE if payload is None else len(payload)])
    _broadcast(size, root_rank, f"{name}.sz", process_set_id)
    if failure is not None:
        raise failure
    num_bytes = int(size)
    if num_bytes == _UNPICKLABLE:
        raise ValueError(f"rank {root_rank} could not pickle the object to broadcast")
    if payload is None:
        payload = bytearray(num_bytes)
    content = torch.frombuffer(payload, dtype=torch.uint8)
    _broadcast(content, root_rank, f"{name}.t", process_set_id)
    return obj if is_root else pickle.loads(payload)


def allgather_object(obj: Any, name: str, process_set_id: int) -> list[Any]:
    """Return every rank's object, in the order of ranks."""
    payload, failure = _pickled(obj)
    size = torch.tensor([_UNPICKLABLE if payload is None else len(payload)])
    sizes = _allgather(size, f"{name}.sz", process_set_id).tolist()
    if failure is not None:
        raise failure
    if _UNPICKLABLE in sizes:
        rank = runtime.process_set_ranks(process_set_id)[sizes.index(_UNPICKLABLE)]
        raise ValueError(f"rank {rank} could not pickle its object")
    mine = torch.frombuffer(payload, dtype=torch.uint8)
    everything = _allgather(mine, f"{name}.t", process_set_id)
    return [pickle.loads(part.numpy().tobytes()) for part in everything.split_with_sizes(sizes)]


def _broadcast(tensor: torch.Tensor, root_rank: int, name: str, process_set_id: int) -> None:
    collective = Collective(Kind.BROADCAST, name, process_set_id, root_rank=root_rank)
    runtime.submit(collective, [tensor], [tensor], background=False).wait()


def _allgather(tensor: torch.Tensor, name: str, process_set_id: int) -> torch.Tensor:
    gathered: torch.Tensor
    collective = Collective(Kind.ALLGATHER, name, process_set_id)
    (gathered,) = runtime.submit(collective, [tensor], background=False).wait()
    return gathered


def _pickled(obj: Any) -> tuple[bytearray | None, Exception | None]:
    """Return the object as writable bytes, or why it cannot be."""
    import cloudpickle  # here, because importing it takes longer than the rest of this module

    buffer = io.BytesIO()
    try:
        cloudpickle.dump(obj, buffer)
    except Exception as error:
        return None, error
    return bytearray(buffer.getbuffer()), None
