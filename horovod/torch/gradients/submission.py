"""Makes requests of the engine of a bucket's gradients: all that the optimizer reduces goes here.

Used by `horovod.torch.gradients.reducer`, which says when. Gradients are reduced where they are:
nothing is copied into or out of a buffer of ours, except that the engine packs the small ones, and
what cannot be reduced as it is (sparse, compressed, laid out unlike its parameter).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.reduce_op import ReduceOp
from horovod.engine.arguments import set_id, set_size
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.execution.scaling import sum_and_scale
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.compression import NARROW, Compressor, NoneCompressor, wire_type
from horovod.torch.gradients.buckets import Bucket, Named
from horovod.torch.gradients.device_bucket import LaneReduction
from horovod.torch.gradients.layouts import flat, laid_out_like, memory_shape
from horovod.torch.hooks.base import CommunicationHook, GradientBucket
from horovod.torch.ops.sparse import sparse_allreduce_async, sparse_tensor

Parameter = torch.nn.Parameter


class BucketSubmitter:
    """Starts the reductions of one optimizer's buckets."""

    def __init__(
        self,
        params: Sequence[Named],
        options: OptimizerOptions,
        hook: CommunicationHook | None = None,
        is_exclusive: bool = False,
    ) -> None:
        self._wanted: type[Compressor] = options.compression
        # In host memory the transport compresses, where the bytes leave the host.
        wire = wire_type(self._wanted, params)
        self._compression = self._wanted if wire is None else NoneCompressor
        self._reduction = Reduction(options.op, *options.predivide_factors, wire)
        self._sparse_as_dense = options.sparse_as_dense
        self.process_set = options.process_set
        self.hook = hook
        self.is_exclusive = is_exclusive  # whether somebody waits for one bucket after the other
        # What the ranks have agreed on: the optimizer's name, and whose gradients are sparse.
        self.name = ""
        self.sparse_dims: Mapping[Parameter, int] = {}

    def lane_reduction(self) -> LaneReduction | None:
        """Return how gradients are reduced on a lane; None if they cannot: see `direct_reducer`."""
        wire = NARROW.get(self._wanted)
        known = wire is not None or self._wanted is NoneCompressor
        reduction = self._reduction
        is_sum = reduction.op in (ReduceOp.SUM, ReduceOp.AVERAGE)
        if self.hook is not None or not is_sum or not known:
            return None
        _, scale = sum_and_scale(reduction, set_size(self.process_set))
        if reduction.prescale_factor == 1.0:
            # All factors before the sum: one kernel, and half precisions do not overflow in it.
            return LaneReduction(scale, 1.0, wire)
        return LaneReduction(reduction.prescale_factor, scale, wire)

    def find_sparse(self, params: Iterable[Parameter]) -> list[int]:
        """Return the sparse dimensions of all gradients that are there; 0 for a dense one."""
        return [
            param.grad.sparse_dim()
            if param.grad is not None and param.grad.is_sparse
            else self.sparse_dims.get(param, 0)
            for param in params
        ]

    def start(self, bucket: Bucket, background: bool) -> None:
        """Start to reduce the bucket's gradients; without `background` the caller waits at once."""
        bucket.started = True
        if background:
            bucket.watch()
        prepared = bucket.prepared
        gradients = bucket.gradients() if prepared is not None else None
        if prepared is not None and gradients is not None:
            at_once = not background and gradients[0].is_cpu
            if not at_once or not prepared.allreduce_inline(gradients):
                bucket.requests.append(prepared.start(gradients, background))
            return
        dense, tensors = self._tensors(bucket)
        if self.hook is not None:
            self._start_hook(self.hook, bucket, dense, tensors)
            return
        background = background or len(tensors) > 1
        for index, same_device in enumerate(tensors.values()):
            request = self._allreduce(bucket, _name(bucket, index), same_device, background)
            if len(tensors) == 1 and self._is_repeatable(bucket, same_device):
                bucket.prepared = runtime.prepare(request)

    def _tensors(
        self, bucket: Bucket
    ) -> tuple[list[Named], dict[torch.device, list[torch.Tensor]]]:
        """Return parameters with dense gradients, and what to reduce for them; start the others."""
        tensors: dict[torch.device, list[torch.Tensor]] = {}
        dense: list[Named] = []
        for name, param in bucket.params:
            if not param.requires_grad:
                continue
            if param.grad is None:  # unused here, perhaps not on other ranks
                param.grad = _nothing(param, self.sparse_dims.get(param))
            if not param.grad.is_sparse:
                tensor = self._flat(bucket, param)
            elif self._sparse_as_dense:
                tensor = self._densified(bucket, param)
            else:
                self._start_sparse(bucket, name, param)
                continue
            tensors.setdefault(tensor.device, []).append(tensor)
            dense.append((name, param))
        return dense, tensors

    def _allreduce(
        self, bucket: Bucket, name: str, tensors: list[torch.Tensor], background: bool
    ) -> Request:
        collective = Collective(Kind.ALLREDUCE, name, set_id(self.process_set), self._reduction)
        request = runtime.submit(
            collective,
            tensors,
            tensors,
            background=background,
            deferred=True,
            is_exclusive=self.is_exclusive,
        )
        bucket.requests.append(request)
        return request

    def _is_repeatable(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the bucket's next gradients will be reduced as they are, like these."""
        return (
            bucket.dtype is not None
            and self._compression is NoneCompressor
            and not self.sparse_dims
            and [tensor.numel() for tensor in tensors] == [p.numel() for _, p in bucket.params]
        )

    def _start_hook(
        self,
        hook: CommunicationHook,
        bucket: Bucket,
        dense: Sequence[Named],
        tensors: dict[torch.device, list[torch.Tensor]],
    ) -> None:
        finishers = []
        for index, (device, same_device) in enumerate(tensors.items()):
            members = [(name, param) for name, param in dense if param.device == device]
            handed = GradientBucket(
                _name(bucket, index),
                [name for name, _ in members],
                [memory_shape(param) for _, param in members],
                same_device,
                self._reduction,
                self.process_set,
                bucket.requests,
            )
            finishers.append(hook.start(handed))
        bucket.finishers[:0] = finishers  # what goes on with the results comes after

    def _start_sparse(self, bucket: Bucket, name: str, param: Parameter) -> None:
        assert param.grad is not None
        gradient, decompress = param.grad, self._compression.decompress
        values, context = self._compression.compress(gradient._values())
        sent = sparse_tensor(gradient._indices(), values, gradient.shape)
        result = sparse_allreduce_async(
            sent, f"{self.name}.{name}", self._reduction.op, self.process_set
        )

        def finish() -> None:
            reduced = result()
            values = decompress(reduced._values(), context)
            param.grad = sparse_tensor(reduced._indices(), values, gradient.shape)

        bucket.finishers.append(finish)

    def _flat(self, bucket: Bucket, param: Parameter) -> torch.Tensor:
        """Return the gradient flat, in the parameter's order, and its own memory if possible."""
        assert param.grad is not None
        gradient = param.grad.data  # changes made through it do not count: see Bucket.watch
        ordered = laid_out_like(param, gradient)
        if ordered is not gradient:
            bucket.finishers.append(lambda: gradient.copy_(ordered))
        return self._compressed(bucket, flat(ordered))

    def _densified(self, bucket: Bucket, param: Parameter) -> torch.Tensor:
        assert param.grad is not None
        num_sparse = param.grad.sparse_dim()
        dense = param.grad.to_dense().contiguous()

        def finish() -> None:
            param.grad = dense.to_sparse(num_sparse)

        bucket.finishers.append(finish)
        return self._compressed(bucket, dense.view(-1))

    def _compressed(self, bucket: Bucket, target: torch.Tensor) -> torch.Tensor:
        """Return what is reduced in place of `target`, which gets the result before all else."""
        if self._compression is NoneCompressor:
            return target
        compressed: torch.Tensor
        compressed, context = self._compression.compress(target)
        if compressed is not target:
            decompress = self._compression.decompress
            bucket.finishers.insert(0, lambda: target.copy_(decompress(compressed, context)))
        return compressed


def _name(bucket: Bucket, index: int) -> str:
    """Return the name of the request for the gradients on one of several devices."""
    return f"{bucket.name}.{index}" if index else bucket.name


def _nothing(param: Parameter, num_sparse: int | None) -> torch.Tensor:
    """Return a gradient of zeros; without entries if the parameter's gradients are sparse."""
    if num_sparse is None:
        return torch.zeros_like(param)
    return sparse_tensor(
        torch.empty((num_sparse, 0), dtype=torch.int64, device=param.device),
        param.new_empty((0, *param.shape[num_sparse:])).detach(),
        param.shape,
    )
