"""The arguments of a Keras `DistributedOptimizer`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from horovod.common.local_steps import LocalSchedule
from horovod.common.optimizer_arguments import check_groups, check_passes, predivide_factors
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op
from horovod.torch.optimizers.local_steps import check_within


@dataclasses.dataclass
class Distribution:
    """The arguments of `DistributedOptimizer`: how an optimizer uses the gradients of all ranks."""

    name: str | None = None
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: ReduceOp = Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    schedule: LocalSchedule = dataclasses.field(default_factory=LocalSchedule)
    # Whether the ranks step with their own gradients; `horovod._keras.local_steps` sets it.
    is_local: bool = dataclasses.field(init=False, default=False)
    # Takes gradients and their variables, and returns the reduced gradients. It depends on the
    # backend, so `horovod._keras.optimizer` sets it when the optimizer is known.
    reduce: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.op = resolve_reduce_op(self.op, None)
        if self.op not in (Average, Sum):
            raise ValueError(f"a Keras optimizer takes op=Average or op=Sum, not {self.op!r}")
        predivide_factors(self.gradient_predivide_factor, self.op)
        check_passes(self.backward_passes_per_step)
        self.groups = check_groups(self.groups)
        if self.schedule.check():
            check_within(self.schedule.within, self.process_set)
            if self.op is not Average:
                raise ValueError("local_steps averages models: leave op at hvd.Average")
            if self.backward_passes_per_step != 1:
                raise ValueError(
                    "local_steps does not go with backward_passes_per_step: pass "
                    "gradient_accumulation_steps to the optimizer itself"
                )

    @property
    def pass_divisor(self) -> int:
        """The number by which the sum of the gradients of a step's passes is divided."""
        return self.backward_passes_per_step if self.average_aggregated_gradients else 1

    def register_local(self, variable: Any) -> None:
        """Do not reduce the gradient of this variable."""
        self.reduce.register_local(variable)
