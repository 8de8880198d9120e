"""Collectives on accelerator tensors by way of host memory, over another transport.

For ranks that share one GPU, which NCCL refuses, and for devices without a library of collectives.
The copies run on the current stream, and a call waits for them, so it returns when the result is on
the device. Called by the transport selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import Group, Transport

PIECE = 64 * 1024 * 1024  # bytes in host memory at a time, where a collective can be cut


class HostCopyTransport(Transport):
    """Collectives over `host`, the transport for CPU tensors.

    The caller keeps `host`, may use it for CPU tensors as well, and closes it.
    """

    name = "HOST_COPY"

    def __init__(self, group: Group, host: Transport) -> None:
        super().__init__(group)
        if (host.rank, host.size) != (group.rank, group.size):
            raise ValueError("the host transport joins other ranks than the group has")
        self.host = host
        self.media = host.media
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._closed = False

    def agree(self, words: bytes, preload: Sequence[torch.Tensor] | None = None) -> int:
        return self._host().agree(words)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        for piece in self._pieces(tensor):
            staged = self._staged(piece)
            staged.copy_(piece)
            self._host().allreduce(staged, op)
            piece.copy_(staged)

    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        result = torch.empty_like(output, device="cpu")
        self._host().reduce_scatter(source.to("cpu", copy=True), result, counts, op)
        output.copy_(result)

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        result = torch.empty_like(output, device="cpu")
        self._host().allgather(source.cpu(), result, counts)
        output.copy_(result)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        for piece in self._pieces(tensor):
            staged = self._staged(piece)
            if self.rank == root:
                staged.copy_(piece)
            self._host().broadcast(staged, root)
            if self.rank != root:
                piece.copy_(staged)

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        result = torch.empty_like(output, device="cpu")
        self._host().alltoall(source.cpu(), result, send_counts, receive_counts)
        output.copy_(result)

    def barrier(self) -> None:
        self._host().barrier()

    def check_peers(self) -> None:
        self.host.check_peers()

    def abort(self, reason: str) -> None:
        self.host.abort(reason)

    def close(self) -> None:
        self._closed = True
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _host(self) -> Transport:
        """Return the transport that moves the bytes; raise after `close`."""
        if self._closed:
            raise HorovodInternalError("Horovod has been shut down")
        return self.host

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensor in pieces that fit into host memory at a time."""
        step = PIECE // tensor.element_size()
        for start in range(0, tensor.numel(), step):
            yield tensor[start : start + step]

    def _staged(self, piece: torch.Tensor) -> torch.Tensor:
        """Return host memory like `piece`; page-locked for CUDA, which copies much faster then."""
        if self._buffer.numel() < piece.nbytes:
            self._buffer = torch.empty(
                piece.nbytes, dtype=torch.uint8, pin_memory=piece.device.type == "cuda"
            )
        return self._buffer[: piece.nbytes].view(piece.dtype)
