"""Records that ranks gather from each other: words to agree on, and small tensors along with them.

A record is a header, the words of an agreement, and the content of tensors, its payload. Every rank
gets every rank's record and reduces the payloads for itself. Used by the TCP transport.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import string_at
from typing import Any

import numpy as np
import torch

from horovod.common.reduce_op import ReduceOp
from horovod.transport.arithmetic import NUMPY_TYPES, reduce_into, tensor_operands

_HEADER = struct.Struct("<QQ")  # bytes of words, bytes of payload
_NO_PAYLOAD = (1 << 64) - 1


def record_head(words: bytes, payload: bytes | None) -> bytes:
    """Return the header and the words of a record, which the payload follows if there is one."""
    return _HEADER.pack(len(words), _NO_PAYLOAD if payload is None else len(payload)) + words


def payload_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the content of tensors, end to end."""
    return b"".join([string_at(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])


def words_of(record: Any) -> bytes:
    """Return the words of a record."""
    nbytes, _ = _HEADER.unpack_from(record)
    return bytes(record[_HEADER.size : _HEADER.size + nbytes])


def bundle(records: Sequence[Any]) -> bytes:
    """Return several records as one message: their lengths, then the records."""
    return b"".join((struct.pack(f"<{len(records)}Q", *map(len, records)), *records))


def unbundle(data: memoryview, count: int) -> list[memoryview]:
    """Return the `count` records of a bundle."""
    records = []
    start = 8 * count
    for length in struct.unpack_from(f"<{count}Q", data):
        records.append(data[start : start + length])
        start += length
    return records


def reduce_payloads(
    payloads: Sequence[Any], tensors: Sequence[torch.Tensor], op: ReduceOp, scale: float
) -> None:
    """Reduce the payloads of all ranks, in rank order, into `tensors`."""
    if not payloads[0]:
        return
    dtype = tensors[0].dtype
    kind = NUMPY_TYPES.get(dtype)
    operands: list[Any]
    if kind is not None:
        operands = [np.frombuffer(payload, kind) for payload in payloads]
    else:
        operands = [torch.frombuffer(bytearray(payload), dtype=dtype) for payload in payloads]
    start = 0
    for target in tensor_operands(tensors):
        stop = start + len(target)
        reduce_into(target, [operand[start:stop] for operand in operands], op)
        if scale != 1.0:
            target *= scale
        start = stop
