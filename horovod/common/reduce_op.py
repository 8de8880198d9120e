"""The reduction operators, with upstream's integer values."""

from __future__ import annotations

from enum import IntEnum


class ReduceOp(IntEnum):
    """How tensors are combined: `hvd.Average`, `hvd.Sum`, `hvd.Min` and so on are its members."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    __hash__ = int.__hash__  # an Enum's own is written in Python, and operators are parts of keys


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
