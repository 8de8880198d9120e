"""The seam between DistributedOptimizer and whatever sends gradients to the other ranks.

The reducer (`horovod.torch.gradients.reducer`) calls a `CommunicationHook` with each
`GradientBucket` in place of its plain allreduce. The hooks beside this module, and those of users,
derive from it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.engine.arguments import set_id, set_size
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.compression import NoneCompressor, is_eight_bit

Tensor = torch.Tensor


class GradientBucket:
    """Gradients of one device that are reduced together, and the collectives to do it with.

    `gradients` are flat tensors, which are to hold the result in the end; gradients of parameters
    that this rank did not use are zeros. `names` are the parameters' names and `shapes` their
    dimensions, outermost in memory first, so that ``gradient.view(shape)`` is the parameter's
    order. `op` is the optimizer's, Average or Sum, and part of its `reduction`; `scale` is the
    factor that turns a sum into the result. `rank` and `num_ranks` count within `process_set`, the
    optimizer's. `name` is the bucket's own, and `requests` is where its collectives are noted.

    Collectives start at once and return a function that waits for the result. All ranks must
    start them alike. A bucket that uses one kind more than once tells them apart by `label`.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        gradients: Sequence[Tensor],
        reduction: Reduction,
        process_set: ProcessSet,
        requests: list[Request] | None = None,
    ) -> None:
        rank = process_set.rank()
        assert rank is not None
        self.name = name
        self.names = list(names)
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.gradients = list(gradients)
        self.op = reduction.op
        self.rank = rank
        self.num_ranks = set_size(process_set)
        self.scale = 1.0 / self.num_ranks if self.op is Average else 1.0
        self._reduction = reduction._replace(wire=None)
        self._set_id = set_id(process_set)
        self._requests = [] if requests is None else requests  # all that were ever started

    def allreduce(self, tensors: Sequence[Tensor], label: str = "") -> Callable[[], list[Tensor]]:
        """Average or add up contiguous `tensors` over all ranks, in place.

        `label` tells several of these in one bucket apart. Returns a function that waits.
        """
        reduced = list(tensors)
        collective = Collective(Kind.ALLREDUCE, self.name + label, self._set_id, self._reduction)
        request = runtime.submit(collective, reduced, reduced, deferred=True)
        return self._waiting(request, lambda _: reduced)

    def allgather(self, tensors: Sequence[Tensor], label: str = "") -> Callable[[], list[Tensor]]:
        """Concatenate the ranks' `tensors`, each along its first dimension, in the order of ranks.

        `label` tells several of these in one bucket apart. Returns a function that waits for them.
        """
        collective = Collective(Kind.ALLGATHER, self.name + label, self._set_id)
        request = runtime.submit(collective, list(tensors))
        return self._waiting(request, _used_here)

    def alltoall(
        self, tensor: Tensor, splits: Sequence[int], label: str = ""
    ) -> Callable[[], Tensor]:
        """Send ``splits[i]`` rows of `tensor` to each rank i; get the ranks' rows, in their order.

        `splits` has a number for each rank; `label` tells several of these in one bucket apart.
        Returns a function that waits for the rows.
        """
        collective = Collective(
            Kind.ALLTOALL, self.name + label, self._set_id, splits=tuple(splits)
        )
        request = runtime.submit(collective, [tensor])
        return self._waiting(request, lambda result: _used_here(result[:1])[0])

    def _waiting(self, request: Request, of: Callable[[Any], Any]) -> Callable[[], Any]:
        self._requests.append(request)
        return lambda: of(request.wait())


class CommunicationHook(ABC):
    """Replaces the allreduce of gradients. An object serves one optimizer, whose state it keeps."""

    _optimizer: Callable[[], object] | None = None  # a weak reference

    @abstractmethod
    def start(self, bucket: GradientBucket) -> Callable[[], None]:
        """Begin to reduce `bucket`; return a function that waits and writes into its gradients.

        This is called for all buckets in the same order on all ranks, possibly while backward goes
        on, so it must not wait. The function is called after backward, again in the same order.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must load to go on as if nothing had happened."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, this rank's `state_dict`; raise ValueError for another hook's."""
        self._expect(state, ())

    def _expect(self, state: dict[str, Any], keys: Sequence[str]) -> None:
        if not isinstance(state, dict) or sorted(state) != sorted(keys):
            found = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"not the state of {self!r}: {found} instead of {sorted(keys)}")

    def serve(self, optimizer: object) -> None:
        """Belong to `optimizer` from now on."""
        self._optimizer = weakref.ref(optimizer)

    def serves_another(self, optimizer: object) -> bool:
        """Return whether it belongs to an optimizer, and not to `optimizer`."""
        return self._optimizer is not None and self._optimizer() is not optimizer

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the optimizer: copies (pickle, deepcopy) belong to copies of the optimizer."""
        return {key: value for key, value in vars(self).items() if key != "_optimizer"}

    def __repr__(self) -> str:
        """Return name and settings; optimizers are made only if all ranks have the same."""
        return f"{type(self).__name__}()"


def _used_here(results: Sequence[Tensor]) -> list[Tensor]:
    """Keep the memory of the engine's new tensors until our stream is done; return the tensors."""
    for tensor in results:
        if not tensor.is_cpu:
            module = torch.get_device_module(tensor.device)
            tensor.record_stream(module.current_stream(tensor.device))
    return list(results)


def check_hook(optimizer: object, hook: Any, compression: Any, op: ReduceOp) -> None:
    """Refuse a hook that the optimizer cannot have, or not with its other arguments."""
    if hook is None:
        if op is ReduceOp.ADASUM and is_eight_bit(compression):
            raise ValueError("op=Adasum does not add up: use hvd.Compression.bf16 or fp16 with it")
        return
    if not isinstance(hook, CommunicationHook):
        raise ValueError(
            f"communication_hook must be a CommunicationHook object such as "
            f"hvd.hooks.PowerSGD(), not {hook!r}"
        )
    if compression is not NoneCompressor:
        raise ValueError(
            "communication_hook and compression both say what travels: pass one of them"
        )
    if op not in (Average, Sum):
        raise ValueError(
            f"communication_hook={hook!r} needs op=Average or op=Sum, not {op.name.capitalize()}"
        )
    if hook.serves_another(optimizer):
        raise ValueError(
            f"communication_hook={hook!r} serves another optimizer already, whose state it keeps: "
            f"make a new one for each optimizer"
        )
