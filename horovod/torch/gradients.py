"""Reducing the gradients of a model's parameters, bucket by bucket. Used by DistributedOptimizer.

A bucket is one group request to the engine. Gradients are reduced where they are: nothing is
copied into or out of a buffer of ours, except that the engine packs the small ones. With cores to
spare, or on an accelerator, a bucket starts as soon as its last gradient has arrived, while
backward goes on; otherwise all gradients are reduced together after backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import ReduceOp
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.sparse import sparse_allreduce_async

LARGEST_BUCKET = 32 * 1024 * 1024  # bytes reduced at a time while backward goes on

Named = tuple[str, torch.nn.Parameter]


class Bucket:
    """Parameters whose gradients are reduced together."""

    __slots__ = ("awaited", "finishers", "name", "params", "requests", "started")

    def __init__(self, name: str, params: Sequence[Named]) -> None:
        self.name = name
        self.params = list(params)
        self.awaited = len(self.params)  # gradients that have not arrived yet
        self.started = False
        self.requests: list[Request] = []
        self.finishers: list[Callable[[], None]] = []

    def reset(self) -> None:
        self.awaited = len(self.params)
        self.started = False
        self.requests = []
        self.finishers = []


class GradientReducer:
    """All buckets of one optimizer."""

    def __init__(
        self,
        name: str,
        params: Sequence[Named],
        groups: Sequence[Sequence[Named]] | None,
        compression: type[Compressor],
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.name = name
        self.compression = compression
        self.op = op
        self.prescale, self.postscale = 1.0 / predivide, predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._params = list(params)
        self._grouped = groups is not None
        self._overlap = _can_overlap(params)
        self._arrivals: list[int] | None = [] if self._overlap and not self._grouped else None
        self._index = {param: index for index, (_, param) in enumerate(params)}
        self._make(groups if groups is not None else self._cut(list(reversed(params))))

    def _make(self, groups: Iterable[Sequence[Named]]) -> None:
        self._buckets = [
            Bucket(f"{self.name}.{number}.{members[0][0]}", members)
            for number, members in enumerate(groups)
            if members
        ]
        self._bucket_of = {param: b for b in self._buckets for _, param in b.params}

    def _cut(self, params: Sequence[Named]) -> list[list[Named]]:
        """Consecutive parameters up to the largest size; all in one if nothing overlaps."""
        if not self._overlap:
            return [list(params)]
        most = min(runtime.config.fusion_threshold, LARGEST_BUCKET)
        cut: list[list[Named]] = [[]]
        size = 0
        for entry in params:
            if cut[-1] and size + entry[1].nbytes > most:
                cut.append([])
                size = 0
            cut[-1].append(entry)
            size += entry[1].nbytes
        return cut

    # -- a step ----------------------------------------------------------------------------

    def arrived(self, param: torch.nn.Parameter) -> None:
        """The gradient of `param` is complete on this rank."""
        if self._arrivals is not None:
            self._arrivals.append(self._index[param])
        bucket = self._bucket_of[param]
        bucket.awaited -= 1
        if bucket.awaited == 0 and self._overlap and not bucket.started:
            self._start(bucket, background=True)

    def in_flight(self) -> bool:
        return any(bucket.started for bucket in self._buckets)

    def finish(self) -> None:
        """Reduce what is left and wait for everything."""
        for bucket in self._buckets:
            if not bucket.started:
                self._start(bucket, background=len(self._buckets) > 1)
        try:
            for bucket in self._buckets:
                for request in bucket.requests:
                    request.wait()
                for finisher in bucket.finishers:
                    finisher()
        finally:
            for bucket in self._buckets:
                bucket.reset()
        self._learn_order()

    def forget(self) -> None:
        """Drop all that is under way, e.g. because the state was replaced."""
        for bucket in self._buckets:
            bucket.reset()

    def _start(self, bucket: Bucket, background: bool) -> None:
        bucket.started = True
        tensors: list[torch.Tensor] = []
        for name, param in bucket.params:
            if not param.requires_grad:
                continue
            if param.grad is None:  # unused here, perhaps not on other ranks
                param.grad = torch.zeros_like(param)
            if param.grad.is_sparse:
                if not self.sparse_as_dense:
                    self._start_sparse(bucket, name, param)
                    continue
                tensors.append(self._densified(bucket, param))
            else:
                tensors.append(self._flat(bucket, param))
        if tensors:
            number = self.process_set.process_set_id
            assert number is not None
            bucket.requests.append(
                runtime.allreduce(
                    tensors,
                    tensors,
                    bucket.name,
                    self.op,
                    self.prescale,
                    self.postscale,
                    number,
                    background,
                )
            )

    def _flat(self, bucket: Bucket, param: torch.nn.Parameter) -> torch.Tensor:
        """The gradient as a flat tensor, the gradient's own memory wherever possible."""
        gradient = param.grad
        assert gradient is not None
        if gradient.is_contiguous():
            flat = gradient.view(-1)
        elif gradient.stride() == param.stride() and _is_dense(gradient):
            # E.g. channels last: all ranks have the parameter laid out alike, so order is right.
            flat = gradient.as_strided((gradient.numel(),), (1,))
        else:
            flat = gradient.contiguous().view(-1)
            bucket.finishers.append(lambda: gradient.copy_(flat.view(gradient.shape)))
        if self.compression is NoneCompressor:
            return flat
        compressed, context = self.compression.compress(flat)
        if compressed is not flat:
            target, decompress = flat, self.compression.decompress
            bucket.finishers.insert(0, lambda: target.copy_(decompress(compressed, context)))
        return compressed

    def _densified(self, bucket: Bucket, param: torch.nn.Parameter) -> torch.Tensor:
        assert param.grad is not None
        dense = param.grad.to_dense().contiguous()

        def finish() -> None:
            param.grad = dense.to_sparse()

        bucket.finishers.append(finish)
        return dense.view(-1)

    def _start_sparse(self, bucket: Bucket, name: str, param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        result = sparse_allreduce_async(
            param.grad, f"{self.name}.{name}", self.op, self.process_set
        )

        def finish() -> None:
            param.grad = result()

        bucket.finishers.append(finish)

    # -- the order of buckets --------------------------------------------------------------

    def _learn_order(self) -> None:
        """After the first step: buckets in the order in which gradients arrived on one rank."""
        if self._arrivals is None:
            return
        order, self._arrivals = self._arrivals, None
        first_seen = list(dict.fromkeys(order))
        missing = [i for i in reversed(range(len(self._params))) if i not in set(first_seen)]
        mine = torch.tensor(first_seen + missing, dtype=torch.int64)
        ranks = self.process_set.ranks
        number = self.process_set.process_set_id
        assert ranks is not None
        assert number is not None
        runtime.broadcast(mine, mine, ranks[0], f"{self.name}.order", number, False).wait()
        self._make(self._cut([self._params[index] for index in mine.tolist()]))


def _can_overlap(params: Sequence[Named]) -> bool:
    """Whether a reduction beside backward helps: an accelerator, or cores without work."""
    if any(not param.is_cpu for _, param in params):
        return True
    return (os.cpu_count() or 1) >= 2 * runtime.topology.local_size


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order."""
    expected = 1
    for extent, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True
