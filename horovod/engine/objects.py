"""Sending any Python object: what the object helpers of all bindings do.

Objects travel as cloudpickle between ranks that have authenticated each other; only the user's own
objects are pickled.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime

_SIZE = struct.Struct("<q")
"""Size of the pickled object that follows. A negative size -1 - n stands for an object that cannot
be pickled, so that nobody waits for it; n bytes of text follow, which say why."""

_MOST_TEXT = 1000  # bytes of that text
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
    if size < 0:
        why = _explanation(head, 0)
        raise ValueError(f"rank {root_rank} could not pickle the object to broadcast: {why}")
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
        if size < 0:
            why = _explanation(everything, start)
            raise ValueError(f"rank {rank} could not pickle its object: {why}")
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
        culprit = _culprit(obj, cloudpickle.dumps)
        if culprit and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(culprit)
        why = f"{type(error).__name__}: {error}" + (f" ({culprit})" if culprit else "")
        text = why.encode(errors="replace")[:_MOST_TEXT]
        return bytearray(_SIZE.pack(-1 - len(text)) + text), error
    parcel = bytearray(buffer.getbuffer())
    _SIZE.pack_into(parcel, 0, len(parcel) - _SIZE.size)
    return parcel, None


def _culprit(obj: Any, dump: Callable[[Any], object]) -> str:
    """Return words that name the value of a dict that cannot be pickled, such as in a state."""
    for key, value in obj.items() if type(obj) is dict else ():
        try:
            dump(value)
        except Exception:
            return f"it is in the value of {key!r}"
    return ""


def _explanation(content: bytearray | memoryview, start: int) -> str:
    """Return the text in place of an object that could not be pickled."""
    (size,) = _SIZE.unpack_from(content, start)
    begin = start + _SIZE.size
    return bytes(content[begin : begin - 1 - size]).decode(errors="replace")
