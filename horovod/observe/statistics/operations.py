"""An engine's operation and channel, as those see them who only look.

The engine's own classes fit these protocols; what is here does not import the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.transport.base import Group


class PendingOperation(Protocol):
    """What has been submitted and has not run."""

    @property
    def name(self) -> str:
        """The operation's name on the wire."""

    @property
    def submitted(self) -> float:
        """When it was submitted, by `time.monotonic`."""

    @property
    def source(self) -> str:
        """The user's line that submitted it, as file:line."""


class Operation(PendingOperation, Protocol):
    """An operation with its tensors."""

    @property
    def label(self) -> str:
        """The kind as the timeline calls it."""

    @property
    def signature(self) -> bytes:
        """What ranks compare; empty on a rank that has joined, and stands in for others."""

    @property
    def kind(self) -> Enum:
        """What it does; the value is a word such as "allreduce"."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """What this rank contributes."""


class ObservedChannel(Protocol):
    """One process set's operations."""

    @property
    def set_id(self) -> int:
        """The number of the process set."""

    @property
    def group(self) -> Group:
        """Its ranks."""

    def pending(self) -> Sequence[PendingOperation]:
        """Return what has been submitted and has not run, oldest first."""

    def abort(self, error: HorovodInternalError) -> None:
        """Fail everything here, and everything that other ranks do together with us."""


def size_of(operation: Operation) -> int:
    """Return the bytes of the operation's tensors."""
    return sum(tensor.nbytes for tensor in operation.tensors)
