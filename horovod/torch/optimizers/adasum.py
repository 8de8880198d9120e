"""The optimizer for op=Adasum: ranks step on their own and combine the steps, not the gradients.

Adaptive optimizers change direction and length of a gradient, so what Adasum combines is the
change of the weights that each rank's own step makes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from horovod.common.reduce_op import Adasum, Max
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.reducer import Reducer
from horovod.torch.ops.allreduce import allreduce_
from horovod.torch.ops.untraced import untraced
from horovod.torch.optimizers.reducing import ReducingOptimizer
from horovod.torch.optimizers.wrapping import notify_scheduler


class AdasumOptimizer(ReducingOptimizer):
    """Combines steps by Adasum; the new class derives from this and the optimizer's own class."""

    def _make_reducer(self, named: list[Named], groups: list[list[Named]] | None) -> Reducer:
        return Reducer()  # gradients stay this rank's own until `step`

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError("op=Adasum combines steps inside step(): it cannot be skipped")

    def _share_found(self, found: dict[torch.device, torch.Tensor]) -> Any:
        """Share torch.amp.GradScaler's finding: without it, some ranks would skip the step."""
        for tensor in found.values():
            allreduce_(tensor, name="AdasumOptimizer.found", op=Max)
        return found

    @untraced
    def step(self, closure: Any = None) -> Any:
        """Step locally, then replace the step by the Adasum of all ranks' steps."""
        notify_scheduler(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._synchronized:
            self.synchronize()
        self._check_gradients()
        params = [param for param in self._parameter_names if param.requires_grad]
        with torch.no_grad():
            starts = [param.detach().clone() for param in params]
            self._base_step()
            deltas = [param - start for param, start in zip(params, starts, strict=True)]
            sent = [self._compression.compress(delta.contiguous()) for delta in deltas]
            alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for tensor, _ in sent:
                alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
            for index, tensors in enumerate(alike.values()):
                name, reduction = f"AdasumOptimizer.{index}", Reduction(Adasum)
                collective = Collective(Kind.ALLREDUCE, name, reduction=reduction)
                runtime.submit(collective, tensors, tensors, background=False).wait()
            for param, start, (tensor, context) in zip(params, starts, sent, strict=True):
                param.copy_(start + self._compression.decompress(tensor, context))
        runtime.statistics.end_step(buckets=len(alike))
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: it hooks the base's step
