"""The optimizer for op=Adasum: ranks step on their own and combine the steps, not the gradients.

Adaptive optimizers change direction and length of a gradient, so what Adasum combines is the
change of the weights that each rank's own step makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from horovod.common.process_sets import global_process_set
from horovod.common.reduce_op import Adasum, Max
from horovod.engine.runtime import runtime
from horovod.torch.optimizer import (
    adopt,
    check_arguments,
    note_step,
    rebuilding,
    reduce_before_unscaling,
    share_groups,
)


class _AdasumOptimizer(torch.optim.Optimizer):
    """What the new class adds to the optimizer's own. Its methods are copied into that class."""

    def _configure(self, arguments: dict[str, Any], check: bool = True) -> None:
        self._arguments = arguments
        self.backward_passes_per_step: int = arguments["backward_passes_per_step"]
        self.op = Adasum
        self.process_set = arguments["process_set"]
        self._compression = arguments["compression"]
        named, _ = check_arguments(arguments, self.param_groups, True, check)
        self._parameter_names = {param: name for name, param in named}
        reduce_before_unscaling()

    def set_backward_passes_per_step(self, passes: int) -> None:
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be positive, not {passes}")
        self.backward_passes_per_step = passes
        self._arguments["backward_passes_per_step"] = passes

    def synchronize(self) -> None:
        """Nothing: gradients stay local, and `step` combines what becomes of them."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("op=Adasum combines steps inside step(): it cannot be skipped")
        yield

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally, as every backward pass does here."""
        return contextlib.nullcontext()

    def _share_found(self, found: dict[torch.device, torch.Tensor]) -> Any:
        """torch.amp.GradScaler's finding, which must be everybody's or some would not step."""
        for tensor in found.values():
            own = tensor.view(-1)
            runtime.allreduce([own], [own], "AdasumOptimizer.found", Max, background=False).wait()
        return found

    def step(self, closure: Any = None) -> Any:
        """Step locally, then replace the step by the Adasum of everybody's."""
        note_step(self)
        loss = closure() if closure is not None else None
        params = [param for param in self._parameter_names if param.requires_grad]
        with torch.no_grad():
            starts = [param.detach().clone() for param in params]
            super(self.__class__, self).step()
            deltas = [param - start for param, start in zip(params, starts, strict=True)]
            sent = [self._compression.compress(delta.contiguous()) for delta in deltas]
            alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for tensor, _ in sent:
                alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
            for place, tensors in enumerate(alike.values()):
                name = f"AdasumOptimizer.{place}"
                runtime.allreduce(tensors, tensors, name, Adasum, background=False).wait()
            for param, start, (tensor, context) in zip(params, starts, sent, strict=True):
                param.copy_(start + self._compression.decompress(tensor, context))
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: it hooks the base's step

    def load_state_dict(self, state_dict: Any) -> None:
        super(self.__class__, self).load_state_dict(state_dict)
        share_groups(self)

    def __reduce__(self) -> Any:
        return rebuilding(self, _AdasumOptimizer)


def make_adasum_optimizer(optimizer: torch.optim.Optimizer, arguments: dict[str, Any]) -> Any:
    if arguments["process_set"] is not global_process_set:
        raise NotImplementedError("op=Adasum works on the global process set only")
    return adopt(optimizer, _AdasumOptimizer, arguments)
