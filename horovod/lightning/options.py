"""The options of a strategy that say how gradients are reduced: those of DistributedOptimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import horovod.torch as hvd
from horovod.common.local_steps import OuterSGD
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.torch.compression import Compression, Compressor
from horovod.torch.gradients.buckets import Named
from horovod.torch.hooks.base import CommunicationHook
from horovod.torch.optimizers.reducing import ReducingOptimizer


@dataclass(frozen=True)
class Options:
    """The arguments of `hvd.DistributedOptimizer`, by its names."""

    compression: type[Compressor] = Compression.none
    backward_passes_per_step: int = 1
    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    shard_state: bool = False
    communication_hook: CommunicationHook | None = None
    local_steps: int | None = None
    outer: OuterSGD | None = None
    warmup_steps: int = 0
    average_state: bool = False
    fragments: int = 1
    delay: int = 0
    alpha: float | None = None
    within: ProcessSet | Literal["host"] | None = None

    def wrap_optimizer(self, optimizer: Any, named: Iterable[Named], passes: int) -> Any:
        """Wrap `optimizer` in a DistributedOptimizer, unless the script has done so itself."""
        if isinstance(optimizer, ReducingOptimizer):
            return optimizer
        names = {id(param): name for name, param in named}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return hvd.DistributedOptimizer(
            optimizer,
            # Parameters that do not belong to the module have no name there.
            named_parameters=[
                (names.get(id(param), f"parameter.{number}"), param)
                for number, param in enumerate(dict.fromkeys(params))
            ],
            compression=self.compression,
            backward_passes_per_step=passes,
            op=self.op,
            gradient_predivide_factor=self.gradient_predivide_factor,
            num_groups=self.num_groups,
            groups=self._select_groups(params),
            sparse_as_dense=self.sparse_as_dense,
            process_set=self.process_set,
            shard_state=self.shard_state,
            # A hook keeps the state of one optimizer; a program may have several, and fit again.
            communication_hook=copy.deepcopy(self.communication_hook),
            local_steps=self.local_steps,
            outer=self.outer,
            warmup_steps=self.warmup_steps,
            average_state=self.average_state,
            fragments=self.fragments,
            delay=self.delay,
            alpha=self.alpha,
            within=self.within,
        )

    def _select_groups(self, params: list[torch.Tensor]) -> Any:
        """Return the groups reduced to these parameters, without those that become empty."""
        if not isinstance(self.groups, (list, tuple)):
            return self.groups
        known = {id(param) for param in params}
        kept = [[param for param in group if id(param) in known] for group in self.groups]
        return [group for group in kept if group]
