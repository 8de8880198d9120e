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
from horovod.common.reduce_op import Adasum
from horovod.engine.runtime import runtime
from horovod.torch.optimizer import _check_alike, _named, adopt


class _AdasumOptimizer(torch.optim.Optimizer):
    """What the new class adds to the optimizer's own. Its methods are copied into that class."""

    def _configure(self, arguments: dict[str, Any]) -> None:
        self.backward_passes_per_step: int = arguments["backward_passes_per_step"]
        self.op = Adasum
        self.process_set = arguments["process_set"]
        self._compression = arguments["compression"]
        named = _named(arguments["named_parameters"], self.param_groups)
        _check_alike(named, self.process_set)
        self._parameter_names = {param: name for name, param in named}

    def set_backward_passes_per_step(self, passes: int) -> None:
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be positive, not {passes}")
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing: gradients stay local, and `step` combines what becomes of them."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("op=Adasum combines steps inside step(): it cannot be skipped")
        yield

    def step(self, closure: Any = None) -> Any:
        """Step locally, then replace the step by the Adasum of everybody's."""
        loss = closure() if closure is not None else None
        params = [param for param in self._parameter_names if param.requires_grad]
        with torch.no_grad():
            starts = [param.detach().clone() for param in params]
            super(self.__class__, self).step()
            deltas = [param - start for param, start in zip(params, starts, strict=True)]
            sent = [self._compression.compress(delta.contiguous()) for delta in deltas]
            vector = [tensor for tensor, _ in sent]
            runtime.allreduce(vector, vector, "AdasumOptimizer", Adasum, background=False).wait()
            for param, start, (tensor, context) in zip(params, starts, sent, strict=True):
                param.copy_(start + self._compression.decompress(tensor, context))
        return loss


def make_adasum_optimizer(optimizer: torch.optim.Optimizer, arguments: dict[str, Any]) -> Any:
    if arguments["process_set"] is not global_process_set:
        raise NotImplementedError("op=Adasum works on the global process set only")
    return adopt(optimizer, _AdasumOptimizer, arguments)
