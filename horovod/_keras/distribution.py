"""`Distribution`: the options of a distributed Keras optimizer, and the object that reduces."""

from __future__ import annotations

from typing import Any

from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.reduce_op import Average, Sum
from horovod.torch.optimizers.local_steps import check_within


class Distribution:
    """The checked options of a `DistributedOptimizer`, and the object that reduces by them."""

    def __init__(self, options: OptimizerOptions) -> None:
        self.options = options = options.checked(Average, Sum)
        if options.schedule.local_steps is not None:
            check_within(options.schedule.within, options.process_set)
            if options.backward_passes_per_step != 1:
                raise ValueError(
                    "local_steps does not go with backward_passes_per_step: pass "
                    "gradient_accumulation_steps to the optimizer itself"
                )
        # Whether the ranks step with their own gradients; `horovod._keras.local_steps` sets it.
        self.is_local = False
        # Takes gradients and their variables, and returns the reduced gradients. It depends on the
        # backend, so `horovod._keras.optimizer` sets it when the optimizer is known.
        self.reduce: Any = None
