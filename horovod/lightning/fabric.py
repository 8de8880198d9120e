"""The strategy for Fabric: ``Fabric(strategy="horovod")``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from horovod.lightning import modules
from horovod.lightning.base import HorovodBase
from horovod.lightning.flavours import Flavour, join_with_base


class FabricStrategy(HorovodBase):
    """Train with Fabric on all ranks of a Horovod job, each with its own copy of the modules.

    `fabric.backward` averages the gradients over the ranks.

    Args:
        **options: The options of `hvd.DistributedOptimizer` (`compression`, `process_set`, ...),
            and those that all of Lightning's strategies take (`checkpoint_io`, ...).

    Raises:
        TypeError: There is no such option.
        ValueError: An option has a wrong value, or is `join`, which only the Trainer supports.

    Examples:
        >>> strategy = HorovodFabricStrategy(compression=hvd.Compression.bf16)
        >>> fabric = Fabric(strategy=strategy)
    """

    precision_argument = "precision"
    checkpoint_io: Any

    def __init__(self, **options: Any) -> None:
        if options.pop("join", False):
            raise ValueError(
                "join=True is for the Trainer, which knows when an epoch ends; with Fabric call "
                "hvd.join() where a rank has no more batches"
            )
        super().__init__(**options)
        self._backward_sync_control = SimpleNamespace(no_backward_sync=self._no_backward_sync)
        self._named_parameters: dict[str, Any] = {}  # those of all modules set up so far

    # -- the environment -------------------------------------------------------------------

    def _set_world_ranks(self) -> None:
        """Check the job; Fabric calls this when it has set all that the program asked for."""
        self._check_job()
        self._announce_rank()

    def setup_environment(self) -> None:
        self._announce_rank()
        self.accelerator.setup_device(self.root_device)

    @property
    def precision(self) -> Any:
        return super().precision  # type: ignore[misc]

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._check_precision(plugin)
        self._precision = plugin

    # -- modules and optimizers ------------------------------------------------------------

    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        modules.check_usable(module)
        modules.share_values(module, self.process_set)
        for name, param in module.named_parameters():
            if name in self._named_parameters:  # an earlier module has it
                name = f"{name}.{len(self._named_parameters)}"
            self._named_parameters[name] = param
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        passes = self._options.backward_passes_per_step
        return self._distributed_optimizers.wrap(optimizer, self._named_parameters.items(), passes)

    # -- a step ----------------------------------------------------------------------------

    def backward(self, tensor: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc]
        self._distributed_optimizers.after_backward()

    def _no_backward_sync(self, module: Any, enabled: bool = True) -> AbstractContextManager[None]:
        """Serve `fabric.no_backward_sync`."""
        return self._distributed_optimizers.block_reduction() if enabled else nullcontext()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        scaled = getattr(self.precision, "scaler", None) is not None
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)

        def compute_and_reduce() -> Any:
            loss = None if closure is None else closure()
            self._distributed_optimizers.before_step(optimizer, False, scaled)
            return self._distributed_optimizers.average_loss(optimizer, loss)

        if closure is None:
            compute_and_reduce()
        else:
            kwargs["closure"] = compute_and_reduce
        with self._distributed_optimizers.skip_reduction(optimizer):
            return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]

    # -- collectives and checkpoints -------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce the tensor in place, as Fabric promises."""
        result = self.reduce_tensor(tensor, group, reduce_op)
        if result is tensor:
            return tensor
        with torch.no_grad():
            return tensor.copy_(result)

    def get_optimizer_state(self, optimizer: Any) -> Any:
        return self.whole_state(optimizer)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the checkpoint on the first rank, and give it to all ranks."""
        files = self.checkpoint_io

        def load(*args: Any, **kwargs: Any) -> Any:
            return self._read_once(lambda: files.load_checkpoint(*args, **kwargs))

        self.checkpoint_io = SimpleNamespace(load_checkpoint=load)
        try:
            return super().load_checkpoint(path, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.checkpoint_io = files

    def teardown(self) -> None:
        self._distributed_optimizers.release()
        self._named_parameters.clear()
        super().teardown()  # type: ignore[misc]


@functools.cache
def fabric_strategy_class(flavour: Flavour) -> Any:
    """Make the strategy for this package's Fabric."""
    flavour.require()
    base = flavour.fabric_part("strategies").ParallelStrategy
    return join_with_base("HorovodFabricStrategy", FabricStrategy, base, flavour)
