"""Declare what observers see of an operation and of a channel of the engine.

The engine's own classes fit these protocols, so that observers need not import the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.transport.base import Group


class PendingOperation(Protocol):
    """An operation that was submitted and has not run."""

    name: str
    submitted: float  # by `time.monotonic`

    @property
    def source(self) -> str:
        """The user's line that submitted it, as file:line."""


class Operation(PendingOperation, Protocol):
    """An operation with what this rank contributes."""

    tensors: Sequence[torch.Tensor]
    signature: bytes  # empty on a rank that has joined, and stands in for others

    @property
    def kind(self) -> Enum:
        """What it does; the value is a word such as "allreduce"."""

    @property
    def label(self) -> str:
        """The kind as the timeline calls it."""


class ObservedChannel(Protocol):
    """One process set's operations."""

    set_id: int
    group: Group

    @property
    def num_run(self) -> int:
        """How many operations have run; all ranks run them in the same order."""

    def pending(self) -> Sequence[PendingOperation]:
        """Return what has been submitted and has not run, oldest first."""

    def find_awaited(self) -> list[int] | None:
        """Return the ranks without which what runs now cannot go on; None if nobody knows."""

    def abort(self, error: HorovodInternalError) -> None:
        """Fail all operations of this channel, on this rank and on the others."""


def size_of(operation: Operation) -> int:
    """Return the bytes of the operation's tensors."""
    return sum(tensor.nbytes for tensor in operation.tensors)
