"""Reducing the gradients of a model's parameters, bucket by bucket. Used by DistributedOptimizer.

A bucket is one group request to the engine. Gradients are reduced where they are: nothing is
copied into or out of a buffer of ours, except that the engine packs the small ones. With cores to
spare, or on an accelerator, a bucket starts as soon as its last gradient has arrived, while
backward goes on; otherwise all gradients are reduced together after backward.

Ranks must cut the same buckets and call them by the same names, whatever differs between their
machines and whatever else each of them has done before. They agree on that in the first step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Max, ReduceOp
from horovod.common.topology import Topology
from horovod.engine.channel import Lane
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.sparse import sparse_allreduce_async

LARGEST_BUCKET = 32 * 1024 * 1024  # bytes reduced at a time while backward goes on

Named = tuple[str, torch.nn.Parameter]

_num_named = 0  # reducers of this process that have got a name: numbers below are taken


class Bucket:
    """Parameters whose gradients are reduced together."""

    __slots__ = ("awaited", "dtype", "finishers", "lane", "name", "params", "requests", "started")

    def __init__(self, name: str, params: Sequence[Named]) -> None:
        self.name = name
        self.params = list(params)
        # Of parameters that are alike enough to be reduced without a look at each: their dtype,
        # and once they have been reduced, the lane on which that goes.
        dtypes = {param.dtype for _, param in params}
        alike = len(dtypes) == 1 and all(p.is_cpu and p.is_contiguous() for _, p in params)
        self.dtype = dtypes.pop() if alike else None
        self.lane: Lane | None = None
        self.reset()

    def gradients(self) -> list[torch.Tensor] | None:
        """All gradients, if they are there and can be reduced as they are."""
        dtype = self.dtype
        found = []
        for _, param in self.params:
            gradient = param.grad
            if (
                gradient is None
                or gradient.dtype is not dtype
                or gradient.layout is not torch.strided
                or not gradient.is_contiguous()
                or gradient.requires_grad  # of backward(create_graph=True)
                or not param.requires_grad
            ):
                return None
            found.append(gradient)
        return found if len(found) > 1 else [found[0].view(-1)]

    def reset(self) -> None:
        self.awaited = len(self.params)  # gradients that have not arrived yet
        self.started = False
        self.requests: list[Request] = []
        self.finishers: list[Callable[[], None]] = []


class GradientReducer:
    """All buckets of one optimizer."""

    def __init__(
        self,
        params: Sequence[Named],
        groups: Sequence[Sequence[Named]] | None,
        compression: type[Compressor],
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.compression = compression
        self.op = op
        self.prescale, self.postscale = 1.0 / predivide, predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.name = ""
        self._params = list(params)
        self._index = {param: index for index, (_, param) in enumerate(params)}
        self._groups = groups
        self._agreed_in: Topology | None = None  # the job whose ranks have agreed
        self._overlap = False
        self._arrivals: list[int] = []  # until then
        self._sparse_dims: dict[int, int] = {}  # of parameters with sparse gradients, by index
        self._any_arrived = False
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, Bucket] = {}

    # -- a step ----------------------------------------------------------------------------

    def arrived(self, param: torch.nn.Parameter) -> None:
        """The gradient of `param` is complete on this rank."""
        self._any_arrived = True
        if self._agreed_in is not runtime.topology:
            self._arrivals.append(self._index[param])
            return
        bucket = self._bucket_of[param]
        bucket.awaited -= 1
        if bucket.awaited == 0 and self._overlap and not bucket.started:
            self._start(bucket, background=True)

    def in_flight(self) -> bool:
        """Whether gradients have arrived that are not reduced yet."""
        return self._any_arrived

    def finish(self) -> None:
        """Reduce what is left and wait for everything."""
        if self._agreed_in is not runtime.topology:
            self._agree()
        failure: Exception | None = None
        try:
            for bucket in self._buckets:
                if not bucket.started:
                    self._start(bucket, background=len(self._buckets) > 1)
            for bucket in self._buckets:
                try:
                    for request in bucket.requests:
                        request.wait()
                    for finisher in bucket.finishers:
                        finisher()
                except Exception as error:  # the others must end before their names are used again
                    failure = failure or error
        finally:
            self.forget()
        if failure is not None:
            raise failure

    def forget(self) -> None:
        """Drop all that is under way, e.g. because the state was replaced."""
        self._any_arrived = False
        self._arrivals.clear()
        for bucket in self._buckets:
            bucket.reset()

    def _start(self, bucket: Bucket, background: bool) -> None:
        bucket.started = True
        if bucket.lane is not None and not background:
            gradients = bucket.gradients()
            if gradients and bucket.lane.channel.reduce_at_once(gradients, bucket.lane):
                return
        tensors: dict[torch.device, list[torch.Tensor]] = {}
        for name, param in bucket.params:
            if not param.requires_grad:
                continue
            if param.grad is None:  # unused here, perhaps not on other ranks
                param.grad = _nothing(param, self._sparse_dims.get(self._index[param]))
            if not param.grad.is_sparse:
                tensor = self._flat(bucket, param)
            elif self.sparse_as_dense:
                tensor = self._densified(bucket, param)
            else:
                self._start_sparse(bucket, name, param)
                continue
            tensors.setdefault(tensor.device, []).append(tensor)
        number = self.process_set.process_set_id
        assert number is not None
        for place, same_device in enumerate(tensors.values()):
            name = f"{bucket.name}.{place}" if place else bucket.name
            waited_for = not background and len(tensors) == 1
            request = runtime.allreduce(
                same_device,
                same_device,
                name,
                self.op,
                self.prescale,
                self.postscale,
                number,
                not waited_for,
            )
            bucket.requests.append(request)
            if waited_for and self._may_use_lane(bucket, same_device):
                bucket.lane = Lane(request, number)

    def _may_use_lane(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the next gradients of the bucket may go the shortest way."""
        return (
            bucket.dtype is not None
            and bucket.dtype.is_floating_point
            and self.prescale == 1.0
            and self.compression is NoneCompressor
            and not self._sparse_dims
            and [tensor.numel() for tensor in tensors] == [p.numel() for _, p in bucket.params]
        )

    def _flat(self, bucket: Bucket, param: torch.nn.Parameter) -> torch.Tensor:
        """The gradient as a flat tensor, the gradient's own memory wherever possible.

        Its elements come in the order in which the parameter has them in memory, which is the
        same on all ranks; a gradient may be laid out differently on each.
        """
        assert param.grad is not None
        gradient = param.grad.detach()
        if gradient.is_contiguous() and param.is_contiguous():
            flat = gradient.view(-1)
        elif gradient.stride() == param.stride() and _is_dense(gradient):
            flat = gradient.as_strided((gradient.numel(),), (1,))  # e.g. channels last
        else:
            ordered = torch.empty_like(param, dtype=gradient.dtype).detach().copy_(gradient)
            flat = ordered.as_strided((ordered.numel(),), (1,))
            bucket.finishers.append(lambda: gradient.copy_(ordered))
        if self.compression is NoneCompressor:
            return flat
        compressed, context = self.compression.compress(flat)
        if compressed is not flat:
            target, decompress = flat, self.compression.decompress
            bucket.finishers.insert(0, lambda: target.copy_(decompress(compressed, context)))
        return compressed

    def _densified(self, bucket: Bucket, param: torch.nn.Parameter) -> torch.Tensor:
        assert param.grad is not None
        num_sparse = param.grad.sparse_dim()
        dense = param.grad.to_dense().contiguous()

        def finish() -> None:
            param.grad = dense.to_sparse(num_sparse)

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

    # -- agreeing --------------------------------------------------------------------------

    def _agree(self) -> None:
        """Agree with the other ranks on name, buckets, and which gradients are sparse.

        Buckets are cut in the order in which gradients arrived on the first rank. While a rank
        has joined, the others agree for this step only: it could not know the outcome later.
        """
        global _num_named
        for index, (_, param) in enumerate(self._params):
            if param.grad is not None and param.grad.is_sparse:
                self._sparse_dims[index] = param.grad.sparse_dim()
        count = len(self._params)
        place, size = self.process_set.rank(), self.process_set.size()
        number = self.process_set.process_set_id
        assert place is not None
        assert size is not None
        assert number is not None
        seen = dict.fromkeys(self._arrivals)
        order = [*seen, *(index for index in reversed(range(count)) if index not in seen)]
        largest = min(runtime.config.fusion_threshold, LARGEST_BUCKET)
        # The maximum over ranks: what must be a minimum is negative.
        vector = torch.tensor(
            [
                _num_named,
                0 if _can_overlap(self._params) else 1,
                -largest,
                *(1 if index == place else 0 for index in range(size)),
                *(order if place == 0 else [0] * count),
                *(self._sparse_dims.get(index, 0) for index in range(count)),
            ]
        )
        # Ranks come here in the order of their steps, so one name does for all optimizers.
        name = "DistributedOptimizer.agreement"
        runtime.allreduce([vector], [vector], name, Max, 1.0, 1.0, number, False).wait()
        mine, no_overlap, negative, *rest = vector.tolist()
        present, order, dims = rest[:size], rest[size : size + count], rest[size + count :]
        _num_named = mine + 1
        self.name = f"DistributedOptimizer.{mine}"
        self._overlap = no_overlap == 0
        self._sparse_dims = {index: dim for index, dim in enumerate(dims) if dim}
        if not present[0]:
            order = list(reversed(range(count)))
        groups = self._groups
        if groups is None:
            groups = self._cut([self._params[index] for index in order], -negative)
        self._make(groups)
        if min(present) == 1:
            self._agreed_in = runtime.topology

    def _make(self, groups: Iterable[Sequence[Named]]) -> None:
        self._buckets = [
            Bucket(f"{self.name}.{number}.{members[0][0]}", members)
            for number, members in enumerate(groups)
            if members
        ]
        self._bucket_of = {param: b for b in self._buckets for _, param in b.params}

    def _cut(self, params: Sequence[Named], most: int) -> list[list[Named]]:
        """Consecutive parameters up to `most` bytes; all in one if nothing overlaps."""
        if not self._overlap:
            return [list(params)]
        cut: list[list[Named]] = [[]]
        size = 0
        for entry in params:
            if cut[-1] and size + entry[1].nbytes > most:
                cut.append([])
                size = 0
            cut[-1].append(entry)
            size += entry[1].nbytes
        return cut


def _can_overlap(params: Sequence[Named]) -> bool:
    """Whether a reduction beside backward helps: an accelerator, or cores without work."""
    if any(not param.is_cpu for _, param in params):
        return True
    return (os.cpu_count() or 1) >= 2 * runtime.topology.local_size


def _nothing(param: torch.nn.Parameter, num_sparse: int | None) -> torch.Tensor:
    """A gradient of zeros; without entries if the parameter's gradients are sparse."""
    if num_sparse is None:
        return torch.zeros_like(param)
    return torch.sparse_coo_tensor(
        torch.empty((num_sparse, 0), dtype=torch.int64, device=param.device),
        param.new_empty((0, *param.shape[num_sparse:])).detach(),
        param.shape,
    )


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
