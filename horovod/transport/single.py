"""The transport of a group of one rank, which sends nothing. Called by the transport selection."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import WORD, Group, Transport


class SingleTransport(Transport):
    """Collectives of one rank: copies, if any. They work for tensors on any device."""

    name = "SINGLE"
    media = ()

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        if group.size != 1:
            raise ValueError(f"a single-rank transport cannot serve {group.size} ranks")
        self._reason: str | None = None

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        self._check()
        return len(words) // WORD

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        self._check()

    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        self._check()
        output.copy_(source)

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        self._check()
        output.copy_(source)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._check()

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        self._check()
        output.copy_(source)

    def barrier(self) -> None:
        self._check()

    def find_awaited(self) -> list[int]:
        return []

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason

    def close(self) -> None:
        self._reason = self._reason or "Horovod has been shut down"

    def _check(self) -> None:
        if self._reason is not None:
            raise HorovodInternalError(self._reason)
