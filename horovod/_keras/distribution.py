"""The arguments of a Keras `DistributedOptimizer`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp, Sum
from horovod.common.util import resolve_reduce_op


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
    # Takes gradients and their variables, and returns the reduced gradients. It depends on the
    # backend, so `horovod._keras.optimizer` sets it when the optimizer is known.
    reduce: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.op = resolve_reduce_op(self.op, None)
        if self.op not in (Average, Sum):
            raise ValueError(f"a Keras optimizer takes op=Average or op=Sum, not {self.op!r}")
        if not self.gradient_predivide_factor > 0:
            raise ValueError(
                "gradient_predivide_factor must be a positive number, not "
                f"{self.gradient_predivide_factor!r}"
            )
        if self.gradient_predivide_factor != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor needs op=Average")
        passes = self.backward_passes_per_step
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step must be positive, not {passes!r}")
        if not _is_groups(self.groups):
            raise ValueError(
                "groups must be a positive number or a list of lists of variables, not "
                f"{self.groups!r}"
            )

    @property
    def pass_divisor(self) -> int:
        """The number by which the sum of the gradients of a step's passes is divided."""
        return self.backward_passes_per_step if self.average_aggregated_gradients else 1

    def register_local(self, variable: Any) -> None:
        """Do not reduce the gradient of this variable."""
        self.reduce.register_local(variable)


def _is_groups(groups: Any) -> bool:
    """Return whether `groups` is None, a positive number, or a list of lists."""
    if isinstance(groups, int) and not isinstance(groups, bool):
        return groups > 0
    return groups is None or (
        isinstance(groups, list) and all(isinstance(group, (list, tuple)) for group in groups)
    )
