"""The strategy for the Trainer: ``Trainer(strategy="horovod")``.

The module stays as it is, and its optimizers become DistributedOptimizers. What Lightning does to
gradients (clip, unscale, show to callbacks) it does to those of all ranks, since they are reduced
at the end of a backward pass: see `horovod.lightning.optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
from horovod.lightning import metrics, modules
from horovod.lightning.base import HorovodBase
from horovod.lightning.sync_batch_norm import layer_sync
from horovod.lightning.uneven import watch_batches


class TrainerStrategy(HorovodBase):
    """Train on all ranks of a Horovod job, each with its own copy of the module.

    `compression`, `backward_passes_per_step`, `op`, `gradient_predivide_factor`, `num_groups`,
    `groups`, `sparse_as_dense`, `process_set`, `shard_state`, `communication_hook`, `local_steps`,
    `outer`, `warmup_steps`, `average_state`, `fragments`, `delay`, `alpha` and `within` are those
    of `hvd.DistributedOptimizer`; with `local_steps` the ranks' parameters are the same again when
    training ends. With `join` ranks may have different numbers of batches: one that has no more
    waits in `hvd.join()` until the epoch is over for all. `lightning`: what all of Lightning's
    strategies take (``checkpoint_io``, ...). ValueError for a wrong option.

    Examples:
        >>> strategy = HorovodStrategy(compression=hvd.Compression.bf16)
        >>> trainer = Trainer(strategy=strategy, max_epochs=10)
    """

    strategy_name = "horovod"
    precision_argument = "precision_plugin"

    model: Any
    lightning_module: Any
    setup_precision_plugin: Callable[[], None]
    lr_scheduler_configs: list[Any]
    _layer_sync: Any = None
    _sync_applied: Any = None
    _released_metrics: Callable[[], None] | None = None
    _watching: Any = None
    elastic_state: Any = None  # set by the callback that commits it

    # -- the environment -------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning has to give each rank its part of the data."""
        return True

    def set_world_ranks(self) -> None:
        """Called when the Trainer is built, once it has told us what it was asked for."""
        self._check_place()
        self._tell_rank()

    def setup_environment(self) -> None:
        hvd.init()
        self._tell_rank()
        self.accelerator.setup_device(self.root_device)

    def setup_distributed(self) -> None:
        """There is nothing of torch.distributed to set up."""

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin  # type: ignore[misc]

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._check_precision(plugin)
        self._precision_plugin = plugin

    # -- before training -------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        if fitting:
            self._settle_accumulation(trainer)
        modules.check_usable(self.model)
        if fitting and self._layer_sync is not None and self._sync_applied is None:
            self._sync_applied = layer_sync(self._layer_sync, self.flavour, self.process_set)
            self.model = self._sync_applied.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        modules.share_values(self.model, self.process_set)
        if fitting:
            self.setup_optimizers(trainer)
            modules.check_devices(self.model, self.optimizers, self.root_device)
        self.setup_precision_plugin()
        if fitting:
            move = self.flavour.fabric_part("utilities.optimizer")._optimizers_to_device
            move(self.optimizers, self.root_device)
            self._watching = watch_batches(self, trainer)
        self._released_metrics = metrics.connect(self.model, self)

    def _settle_accumulation(self, trainer: Any) -> None:
        """backward_passes_per_step is what the Trainer calls accumulate_grad_batches."""
        passes = self._options.backward_passes_per_step
        if passes == 1 or not self.lightning_module.automatic_optimization:
            return
        if trainer.accumulate_grad_batches not in (1, passes):
            raise ValueError(
                f"backward_passes_per_step={passes} of the strategy and accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches} of the Trainer mean the same: give one of them"
            )
        trainer.accumulate_grad_batches = passes

    def setup_optimizers(self, trainer: Any) -> None:
        self._release_optimizers()
        super().setup_optimizers(trainer)  # type: ignore[misc]
        mock = self.flavour.trainer_part("core.optimizer")._MockOptimizer
        automatic = self.lightning_module.automatic_optimization
        # With automatic optimization Lightning says which backward pass is the last.
        passes = 1 if automatic else self._options.backward_passes_per_step
        named = list(self.lightning_module.named_parameters())
        self.optimizers = [
            each if isinstance(each, mock) else self._reduced.wrap(each, named, passes)
            for each in self.optimizers
        ]
        self._reduced.lead(config.scheduler for config in self.lr_scheduler_configs)

    @property
    def optimizers(self) -> list[Any]:
        found: list[Any] = super().optimizers  # type: ignore[misc]
        return found

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        setter: Any = super(TrainerStrategy, type(self)).optimizers  # type: ignore[misc]
        setter.fset(self, optimizers)
        for outer in self._lightning_optimizers:
            # Lightning's wrapper inherits these methods, but has no state of its own for them.
            for name in _OF_THE_INNER:
                if hasattr(outer._optimizer, name):
                    setattr(outer, name, getattr(outer._optimizer, name))

    _lightning_optimizers: list[Any]

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = None if self.elastic_state is None else self.elastic_state._trainer
        if trainer is None or not trainer.training:
            return dataloader
        from horovod.lightning.elastic.callback import elastic_loader

        return elastic_loader(dataloader, trainer, self.elastic_state, self.flavour)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    # -- a step ----------------------------------------------------------------------------

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's own, with the reduction before anybody looks at the gradients."""
        module, precision = self.lightning_module, self.precision_plugin
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._reduced.after_backward(only=module.automatic_optimization)
        return precision.post_backward(closure_loss, module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self._reduced.blocked():
            yield

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        automatic = self.lightning_module.automatic_optimization
        scaled = getattr(self.precision_plugin, "scaler", None) is not None

        def reduced() -> Any:
            loss = closure()
            self._reduced.before_step(optimizer, automatic, scaled)
            return self._reduced.averaged_loss(optimizer, loss)

        with self._reduced.stepping(optimizer):
            return self.precision_plugin.optimizer_step(
                optimizer, model=model or self.lightning_module, closure=reduced, **kwargs
            )

    # -- collectives and checkpoints -------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduced(tensor, group, reduce_op)

    def optimizer_state(self, optimizer: Any) -> Any:
        return self.whole_state(optimizer)

    def load_checkpoint(self, checkpoint_path: Any, **keywords: Any) -> Any:
        """The first rank reads, and all ranks get model, optimizers, schedulers and loops."""
        if hasattr(checkpoint_path, "content"):  # of an elastic state: every rank has it
            return checkpoint_path.content()
        read = super().load_checkpoint  # type: ignore[misc]
        return self._read_once(lambda: read(checkpoint_path, **keywords))

    # -- the end ---------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        modules.share_buffers(self.lightning_module, self.process_set)

    def on_train_end(self) -> None:
        self._reduced.synchronize_parameters()
        modules.share_buffers(self.lightning_module, self.process_set)

    def _release_optimizers(self) -> None:
        if self._reduced.any_wrapped():
            self.optimizers = self._reduced.release()

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's advice for DistributedDataParallel does not apply."""

    def teardown(self) -> None:
        """Leave module, optimizers and Trainer as they would be without Horovod."""
        if self._watching is not None:
            self._watching.stop()
            self._watching = None
        if self._released_metrics is not None:
            self._released_metrics()
            self._released_metrics = None
        self._release_optimizers()
        if self._sync_applied is not None:
            self._sync_applied.revert(self.model)
            self._sync_applied = None
        module = self.lightning_module
        if module is not None and any(param.is_meta for param in module.parameters()):
            # It was refused because of that, and moving it would hide the reason.
            self._lightning_module = None
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self._lightning_module = module

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """The base class would register the names of DDP again."""


_OF_THE_INNER = (
    "add_param_group",
    "consolidate_state_dict",
    "load_state_dict",
    "no_sync",
    "skip_synchronize",
    "state_dict",
    "synchronize",
    "synchronize_parameters",
    "zero_grad",
)
