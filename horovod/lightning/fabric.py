"""The strategy for Fabric: ``Fabric(strategy="horovod")``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from horovod.lightning import modules
from horovod.lightning.base import HorovodBase


class FabricStrategy(HorovodBase):
    """Train with Fabric on all ranks of a Horovod job, each with its own copy of the modules.

    `options` are those of `hvd.DistributedOptimizer`. Gradients are averaged by `fabric.backward`.
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
        self._backward_sync_control = _SyncControl(self)
        self._named: dict[str, Any] = {}  # parameters of the modules that were set up

    # -- the environment -------------------------------------------------------------------

    def _set_world_ranks(self) -> None:
        """Called when the Fabric is built, once it has told us what it was asked for."""
        self._check_place()
        self._tell_rank()

    def setup_environment(self) -> None:
        self._tell_rank()
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
            self._named[name if name not in self._named else f"{name}.{len(self._named)}"] = param
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        passes = self._options.backward_passes_per_step
        return self._reduced.wrap(optimizer, self._named.items(), passes)

    # -- a step ----------------------------------------------------------------------------

    def backward(self, tensor: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc]
        self._reduced.after_backward()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        scaled = getattr(self.precision, "scaler", None) is not None
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)

        def reduced() -> Any:
            loss = None if closure is None else closure()
            self._reduced.before_step(optimizer, False, scaled)
            return self._reduced.averaged_loss(optimizer, loss)

        if closure is None:
            reduced()
        else:
            kwargs["closure"] = reduced
        with self._reduced.stepping(optimizer):
            return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]

    # -- collectives and checkpoints -------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """In place, as Fabric promises."""
        result = self.reduced(tensor, group, reduce_op)
        if result is tensor:
            return tensor
        with torch.no_grad():
            return tensor.copy_(result)

    def get_optimizer_state(self, optimizer: Any) -> Any:
        return self.whole_state(optimizer)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """The first rank reads, and all ranks get what it has read."""
        files = self.checkpoint_io
        self.checkpoint_io = _ReadOnce(files, self._read_once)
        try:
            return super().load_checkpoint(path, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.checkpoint_io = files

    def teardown(self) -> None:
        self._reduced.release()
        self._named.clear()
        super().teardown()  # type: ignore[misc]


class _SyncControl:
    """For `fabric.no_backward_sync`."""

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: Any, enabled: bool = True) -> AbstractContextManager[None]:
        return self._strategy._reduced.blocked() if enabled else nullcontext()


class _ReadOnce:
    """Files that the first rank reads for all."""

    def __init__(self, files: Any, read_once: Callable[[Callable[[], Any]], Any]) -> None:
        self._files = files
        self._read_once = read_once

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return self._read_once(lambda: self._files.load_checkpoint(*args, **kwargs))
