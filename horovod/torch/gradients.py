"""Reducing the gradients of a model's parameters, bucket by bucket. Used by DistributedOptimizer.

A bucket is one group request to the engine. Gradients are reduced where they are: nothing is
copied into or out of a buffer of ours, except that the engine packs the small ones. On an
accelerator and between hosts (`overlap`) a bucket starts as soon as its last gradient has arrived,
while backward goes on; otherwise all gradients are reduced together after backward.

Ranks must cut the same buckets and call them by the same names, whatever differs between their
machines and whatever else each of them has done before. They agree on that in the first step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Max, ReduceOp
from horovod.common.topology import Topology
from horovod.engine.heap import join_pages
from horovod.engine.runtime import runtime
from horovod.engine.statistics import DeviceTiming
from horovod.torch.autotune import (
    NUM_PREFERENCES,
    AgreedTuning,
    StepTuner,
    greatest,
    local_preferences,
)
from horovod.torch.buckets import Bucket, bucket_title, cut
from horovod.torch.buckets import Named as Named
from horovod.torch.compression import Compressor, NoneCompressor, wire_type
from horovod.torch.hooks.base import CommunicationHook, GradientBucket
from horovod.torch.layouts import is_dense, memory_shape
from horovod.torch.overlap import (
    TRIAL_STEPS,
    can_overlap,
    device_bucket,
    host_bucket,
    network_bucket,
    num_early,
    pays_beside_backward,
)
from horovod.torch.sparse import sparse_allreduce_async, sparse_tensor

# After these steps the heap is put on huge pages: tensors find their places in it in the first few,
# and other ones when the program changes.
_JOINING = frozenset(2**power for power in range(2, 11))

_num_named = 0  # reducers of this process that have got a name: numbers below are taken


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
        hook: CommunicationHook | None = None,
    ) -> None:
        # In host memory the transport does it, where the bytes leave the host.
        self._wire = wire_type(compression, params)
        self.compression = compression if self._wire is None else NoneCompressor
        self.op = op
        self.prescale, self.postscale = 1.0 / predivide, predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.hook = hook
        self.delays = False  # whether the next forward waits, for one bucket after the other
        self.name = ""
        self._params = list(params)
        self._total = sum(param.nbytes for _, param in params)
        self._params_in_order = self._params  # of arrival, once the ranks have agreed
        self._index = {param: index for index, (_, param) in enumerate(params)}
        self._groups = groups
        self._agreed_in: Topology | None = None  # the job whose ranks have agreed
        self._overlap = False
        self._limit = self._most = 0  # bytes of a bucket: the most that all ranks want, and now
        self._agreed: AgreedTuning | None = None  # what the ranks have agreed on about tuning
        # While it is measured: seconds that all takes, and seconds that backward could hide of it.
        self._trial: list[tuple[float, float]] | None = None
        self._tuner: StepTuner | None = None  # while measured times decide how to go on
        self._arrivals: list[int] = []  # until then
        self._sparse_dims: dict[int, int] = {}  # of parameters with sparse gradients, by index
        self._any_arrived = False
        self._first_arrival = 0.0  # when the first gradient of this step was there
        self._backward: DeviceTiming | None = None  # of this step, on a device
        self._steps = 0
        self._last_step = 0.0  # when the gradients of the step before were there
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}  # by the places of parameters

    # -- a step ----------------------------------------------------------------------------

    def arrived(self, index: int) -> None:
        """The gradient of this parameter, by its place among all, is complete on this rank."""
        if not self._any_arrived:
            self._any_arrived = True
            self._first_arrival = time.monotonic()
            param = self._params[index][1]
            if not param.is_cpu and runtime.statistics.times_devices:
                self._backward = DeviceTiming(param.device)
        if self._agreed_in is not runtime.topology:
            self._arrivals.append(index)
            return
        if not self._overlap:
            return
        bucket = self._bucket_of[index]
        bucket.awaited -= 1
        if bucket.awaited > 0:
            return
        if self.hook is not None:
            self._start_in_order()
        elif not bucket.started and not bucket.held:
            self._start(bucket, background=True)

    def _start_in_order(self) -> None:
        """Start complete buckets, but none before those that come first on all ranks."""
        for bucket in self._buckets:
            if bucket.awaited > 0:
                break
            if not bucket.started:
                self._start(bucket, background=True)

    def in_flight(self) -> bool:
        """Whether gradients have arrived that are not reduced yet."""
        return self._any_arrived

    def is_tuning(self) -> bool:
        """Whether the best way to reduce is still being looked for."""
        return self._tuner is not None or self._trial is not None

    def finish(self) -> None:
        """Reduce what is left and wait for everything."""
        if self._agreed_in is not runtime.topology:
            self._agree()
        failure: Exception | None = None
        began = time.monotonic()
        self._tell_backward(began)
        try:
            for bucket in self._by_need():
                if not bucket.started:
                    self._start(bucket, background=len(self._buckets) > 1)
        except Exception as error:
            failure = error
        arrival = self._first_arrival if self._any_arrived else 0.0
        failure = self._wait() or failure
        if failure is not None:
            raise failure
        self._steps += 1
        self._record_step(arrival, began)
        if self._trial is not None:
            hidden = began - self._first_arrival if self._first_arrival else 0.0
            self._try(self._trial, time.monotonic() - began, hidden)
        self._join_pages()
        if self._tuner is not None:
            self._tune(self._tuner)

    def _tell_backward(self, now: float) -> None:
        """The gradients are wanted: what came before was backward, from the first of them on."""
        seconds = now - self._first_arrival if self._any_arrived else 0.0
        timing, self._backward = self._backward, None
        if timing is not None:
            timing.end()
        runtime.statistics.add_backward(seconds, len(self._buckets), timing)

    def _by_need(self) -> list[Bucket]:
        """In the order in which to start them: of those held, the last is needed first."""
        held = [bucket for bucket in self._buckets if bucket.held]
        return [bucket for bucket in self._buckets if not bucket.held] + held[::-1]

    def can_delay(self) -> bool:
        """Whether there is something to gain if nobody waits in a step: see `release`."""
        return (
            self._overlap
            and self._agreed_in is runtime.topology
            and self._trial is None
            and self._tuner is None
            and self._crosses_hosts()
            and all(param.is_cpu for _, param in self._params)
        )

    def release(self) -> list[Bucket]:
        """Start what is left, and leave it to the caller to wait for each bucket (`settle`).

        The caller does so with all of them before it comes here again.
        """
        self._tell_backward(time.monotonic())
        try:
            for bucket in self._by_need():
                if not bucket.started:
                    self._start(bucket, background=True)
                bucket.check_unchanged()
        except Exception:
            self._wait()
            raise
        arrival = self._first_arrival if self._any_arrived else 0.0
        self._any_arrived = False
        self._steps += 1
        self._record_step(arrival, time.perf_counter())
        self._join_pages()
        return self._buckets

    def settle(self, bucket: Bucket) -> Exception | None:
        """Wait until its gradients are reduced. The first failure."""
        failure: Exception | None = None
        try:
            for wait in (
                *(request.wait for request in bucket.requests),
                bucket.check_unchanged,
                *bucket.finishers,
            ):
                try:
                    wait()
                except Exception as error:
                    failure = failure or error
        finally:
            bucket.reset()
        return failure

    def abandon(self) -> None:
        """Wait for what is under way, and drop the results: e.g. the state was replaced."""
        self._wait()

    def _wait(self) -> Exception | None:
        """Let all requests end, for their names will be used again. The first failure."""
        failure: Exception | None = None
        try:
            for bucket in self._buckets:
                error = self.settle(bucket)
                failure = failure or error
        finally:
            self._any_arrived = False
            self._arrivals.clear()
            for bucket in self._buckets:
                bucket.reset()
        return failure

    def _record_step(self, first_arrival: float, backward_ended: float) -> None:
        """In the timeline a step lasts from the end of one exchange of gradients to the next."""
        timeline = runtime.timeline
        if timeline is not None and self._last_step:
            backward = (first_arrival, backward_ended)
            timeline.step(self.name, self._steps, self._last_step, backward)
        self._last_step = time.perf_counter()

    def _join_pages(self) -> None:
        if self._steps not in _JOINING or not any(param.is_cpu for _, param in self._params):
            return
        if runtime.config.keep_heap and runtime.config.huge_pages:
            join_pages()

    def _start(self, bucket: Bucket, background: bool) -> None:
        bucket.started = True
        if background:
            bucket.watch()
        gradients = bucket.gradients() if bucket.prepared is not None else None
        if bucket.prepared is not None and gradients is not None:
            at_once = not background and gradients[0].is_cpu
            if not at_once or not bucket.prepared.allreduce_inline(gradients):
                bucket.requests.append(bucket.prepared.start(gradients, background))
            return
        tensors: dict[torch.device, list[torch.Tensor]] = {}
        dense: list[Named] = []
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
            dense.append((name, param))
        if self.hook is not None:
            self._start_hook(self.hook, bucket, dense, tensors)
            return
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
                prescale=self.prescale,
                postscale=self.postscale,
                process_set_id=number,
                background=not waited_for,
                deferred=True,
                wire=self._wire,
                alone=self.delays,
            )
            bucket.requests.append(request)
            if len(tensors) == 1 and self._can_repeat(bucket, same_device):
                bucket.prepared = runtime.prepare(request, number)

    def _start_hook(
        self,
        hook: CommunicationHook,
        bucket: Bucket,
        dense: Sequence[Named],
        tensors: dict[torch.device, list[torch.Tensor]],
    ) -> None:
        finishers = []
        for place, (device, same_device) in enumerate(tensors.items()):
            members = [(name, param) for name, param in dense if param.device == device]
            handed = GradientBucket(
                f"{bucket.name}.{place}" if place else bucket.name,
                [name for name, _ in members],
                [memory_shape(param) for _, param in members],
                same_device,
                self.op,
                self.process_set,
                self.prescale,
                self.postscale,
                bucket.requests,
            )
            finishers.append(hook.start(handed))
        bucket.finishers[:0] = finishers  # what goes on with the results comes after

    def _can_repeat(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the next gradients of the bucket will be reduced as they are, like these."""
        return (
            bucket.dtype is not None
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
        gradient = param.grad.data  # changes made through it do not count: see Bucket.watch
        if gradient.is_contiguous() and param.is_contiguous():
            flat = gradient.view(-1)
        elif gradient.stride() == param.stride() and is_dense(gradient):
            flat = gradient.as_strided((gradient.numel(),), (1,))  # e.g. channels last
        else:
            ordered = torch.empty_like(param, dtype=gradient.dtype).detach().copy_(gradient)
            flat = ordered.as_strided((ordered.numel(),), (1,))
            bucket.finishers.append(lambda: gradient.copy_(ordered))
        return self._compressed(bucket, flat)

    def _compressed(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        """What is reduced in place of `flat`, which gets the result before anything else."""
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
        return self._compressed(bucket, dense.view(-1))

    def _start_sparse(self, bucket: Bucket, name: str, param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        gradient, decompress = param.grad, self.compression.decompress
        values, context = self.compression.compress(gradient._values())
        sent = sparse_tensor(gradient._indices(), values, gradient.shape)
        result = sparse_allreduce_async(sent, f"{self.name}.{name}", self.op, self.process_set)

        def finish() -> None:
            reduced = result()
            values = decompress(reduced._values(), context)
            param.grad = sparse_tensor(reduced._indices(), values, gradient.shape)

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
        # The maximum over ranks: what must be a minimum is negative.
        vector = torch.tensor(
            [
                _num_named,
                0 if self._can_overlap() else 1,
                -runtime.config.fusion_threshold,
                *local_preferences(runtime.config, runtime.topology),
                *(1 if index == place else 0 for index in range(size)),
                *(order if place == 0 else [0] * count),
                *(self._sparse_dims.get(index, 0) for index in range(count)),
            ]
        )
        # Ranks come here in the order of their steps, so one name does for all optimizers.
        name = "DistributedOptimizer.agreement"
        runtime.allreduce(
            [vector], [vector], name, Max, process_set_id=number, background=False
        ).wait()
        mine, no_overlap, negative, *rest = vector.tolist()
        terms, rest = AgreedTuning.of(rest[:NUM_PREFERENCES]), rest[NUM_PREFERENCES:]
        present, order, dims = rest[:size], rest[size : size + count], rest[size + count :]
        _num_named = mine + 1
        self.name = f"DistributedOptimizer.{mine}"
        self._sparse_dims = {index: dim for index, dim in enumerate(dims) if dim}
        if not present[0]:
            order = list(reversed(range(count)))
        self._params_in_order = [self._params[index] for index in order]
        self._limit = -negative
        self._trial = self._tuner = None
        overlap, most = no_overlap == 0, self._bucket_bytes()
        if min(present) == 1:
            self._agreed_in = runtime.topology
            if terms.enabled:
                self._make(overlap, most)
                self._tuner = self._new_tuner(terms)
                return
            self._agreed = terms
            if overlap and self._crosses_hosts() and self._groups is None:
                if not terms.is_fixed_bucket:
                    self._trial, overlap = [], False
            elif not overlap and terms.spare_cores and self._may_try_overlap(terms):
                self._make(overlap, most)
                self._tuner = self._new_tuner(terms.for_overlap_alone())
                return
        self._make(overlap, most)

    def _bucket_bytes(self) -> int:
        on_device = any(not param.is_cpu for _, param in self._params)
        return (device_bucket if on_device else host_bucket)(self._total, self._limit)

    def _may_try_overlap(self, terms: AgreedTuning) -> bool:
        """Whether it is up to us, and in host memory, where it depends on many things."""
        in_host_memory = all(param.is_cpu for _, param in self._params)
        return in_host_memory and not terms.is_fixed_overlap and self.hook is None

    def _new_tuner(self, terms: AgreedTuning) -> StepTuner:
        return StepTuner(
            self.name,
            self._params_in_order,
            self._groups is not None,
            self._overlap,
            self._most,
            terms,
            self.process_set,
        )

    def _can_overlap(self) -> bool:
        """What this rank says of it."""
        on_device = any(not param.is_cpu for _, param in self._params)
        return can_overlap(on_device, self._crosses_hosts(), runtime.config.overlap_backward)

    def _crosses_hosts(self) -> bool:
        number = self.process_set.process_set_id
        assert number is not None
        return runtime.crosses_hosts(number)

    def _try(self, trial: list[tuple[float, float]], seconds: float, hidden: float) -> None:
        """All gradients were reduced at once in so many seconds; after some of that, cut buckets.

        A rank that others wait for sees what the network alone takes, so the least time counts.
        """
        trial.append((seconds, hidden))
        if len(trial) < TRIAL_STEPS:
            return
        least = [-min(seconds) for seconds in zip(*trial, strict=True)]
        (least_of_all, least_hidden), complete = greatest(least, self.process_set)
        if not complete:  # while a rank has joined: it could not know what the others make of it
            del trial[0]
            return
        self._trial = None
        assert self._agreed is not None
        wanted = self.delays or self._agreed.is_fixed_overlap
        overlap = wanted or pays_beside_backward(self._total, -least_of_all)
        self._make(overlap, network_bucket(self._total, self._limit, -least_of_all))
        if self.delays:
            if self._groups is None and least_of_all < 0:
                self._hold_back(self._total * least_hidden / least_of_all)
        elif not overlap and self._agreed.spare_cores and self._may_try_overlap(self._agreed):
            self._tuner = self._new_tuner(self._agreed.for_overlap_alone())

    def _hold_back(self, hidden: float) -> None:
        """Start in the step what backward, which hides so many bytes, does not hide."""
        sizes = [sum(param.nbytes for _, param in bucket.params) for bucket in self._buckets]
        for bucket in self._buckets[num_early(sizes, hidden) :]:
            bucket.held = True

    def _tune(self, tuner: StepTuner) -> None:
        """Go on as the measured times say; between steps, and on all ranks alike."""
        setting = tuner.after_step()
        if setting is not None:
            self._make(setting.overlap, setting.bucket_bytes)
        if tuner.settled:
            self._tuner = None

    def _make(self, overlap: bool, most: int) -> None:
        """Buckets of up to `most` bytes; all in one if nothing overlaps."""
        self._overlap, self._most = overlap, most
        groups: Iterable[Sequence[Named]] = [self._params_in_order]
        if self._groups is not None:
            groups = self._groups
        elif overlap:
            groups = cut(self._params_in_order, most)
        parts = [members for members in groups if members]
        self._buckets = []
        for number, members in enumerate(parts, 1):
            names = [name for name, _ in members]
            bucket = Bucket(f"{self.name}.{bucket_title(number, len(parts), names)}", members)
            runtime.name_members(bucket.name, names)
            self._buckets.append(bucket)
        self._bucket_of = {self._index[param]: b for b in self._buckets for _, param in b.params}


def _nothing(param: torch.nn.Parameter, num_sparse: int | None) -> torch.Tensor:
    """A gradient of zeros; without entries if the parameter's gradients are sparse."""
    if num_sparse is None:
        return torch.zeros_like(param)
    return sparse_tensor(
        torch.empty((num_sparse, 0), dtype=torch.int64, device=param.device),
        param.new_empty((0, *param.shape[num_sparse:])).detach(),
        param.shape,
    )
