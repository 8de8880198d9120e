"""The strategy for the Trainer: ``Trainer(strategy="horovod")``.

The module stays as it is, and its optimizers become DistributedOptimizers. Gradients are reduced at
the end of a backward pass (see `horovod.lightning.optimizers`), so Lightning clips, unscales and
shows to callbacks the gradients of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
from horovod.lightning import modules
from horovod.lightning.base import HorovodBase
from horovod.lightning.collectives import connect_metrics
from horovod.lightning.flavours import Flavour, join_with_base
from horovod.lightning.uneven import watch_batches


class TrainerStrategy(HorovodBase):
    """Train on all ranks of a Horovod job, each with its own copy of the module.

    All options but `join` and `**lightning` are those of `hvd.DistributedOptimizer`.

    Args:
        compression: How gradients are compressed on the way; not at all by default.
        backward_passes_per_step: How many passes add up gradients before a step; 1 by default. The
            Trainer's `accumulate_grad_batches` means the same.
        op: `Average` (the default), `Sum` or `Adasum`.
        gradient_predivide_factor: Divide gradients by this factor before the sum and by
            `size / factor` after it; the result is still the average. 1.0 by default.
        num_groups: Older form of `groups`.
        groups: The number of groups in which gradients are reduced, or lists of parameters that
            form a group; None (the default) lets Horovod choose.
        sparse_as_dense: Whether to reduce sparse gradients as dense ones; False by default.
        process_set: The ranks that train together; all ranks by default.
        shard_state: Whether to spread the optimizer's state over the ranks; False by default.
        communication_hook: A hook that replaces the reduction of gradients; None by default.
        local_steps: How many steps each rank takes alone before all synchronise their parameters;
            None (the default) averages gradients in every step. When training ends the parameters
            of all ranks are the same again.
        outer: The optimizer with which the ranks take a common step when they synchronise; None
            (the default) averages their parameters.
        warmup_steps: Ordinary steps before the first local one; 0 by default.
        average_state: Whether synchronising averages the optimizer's state, too; False by default.
        fragments: How many parts of the model are synchronised in turn; 1 by default.
        delay: Steps from sending a part to updating it; 0 by default.
        alpha: Share of a rank's own parameters that an update keeps; 0.5 by default with `delay`.
        within: The process set, or "host", in which gradients are averaged in every step.
        join: Whether ranks may have different numbers of batches; False by default. A rank without
            further batches then waits in `hvd.join()` until the epoch is over on all ranks.
        **lightning: What all of Lightning's strategies take, such as `checkpoint_io`.

    Raises:
        TypeError: There is no such option.
        ValueError: An option has a wrong value.

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
    _disconnect_metrics: Callable[[], None] | None = None
    _batch_watcher: Any = None
    elastic_state: Any = None  # set by the callback that commits this state

    # -- the environment -------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Return True, so that Lightning gives each rank its own part of the data."""
        return True

    def set_world_ranks(self) -> None:
        """Check the job; the Trainer calls this when it has set all that the program asked for."""
        self._check_job()
        self._announce_rank()

    def setup_environment(self) -> None:
        hvd.init()
        self._announce_rank()
        self.accelerator.setup_device(self.root_device)

    def setup_distributed(self) -> None:
        """Do nothing: Horovod does not use torch.distributed."""

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
            self._sync_applied = modules.choose_layer_sync(
                self._layer_sync, self.flavour, self.process_set
            )
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
            self._batch_watcher = watch_batches(self, trainer)
        self._disconnect_metrics = connect_metrics(self.model, self)

    def _settle_accumulation(self, trainer: Any) -> None:
        """Give the Trainer our backward_passes_per_step, which it calls accumulate_grad_batches."""
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
        # With automatic optimization Lightning itself announces the last backward pass of a step.
        passes = 1 if automatic else self._options.backward_passes_per_step
        named = list(self.lightning_module.named_parameters())
        self.optimizers = [
            each
            if isinstance(each, mock)
            else self._distributed_optimizers.wrap(each, named, passes)
            for each in self.optimizers
        ]
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self._distributed_optimizers.adopt_schedulers(schedulers)

    @property
    def optimizers(self) -> list[Any]:
        optimizers: list[Any] = super().optimizers  # type: ignore[misc]
        return optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        setter: Any = super(TrainerStrategy, type(self)).optimizers  # type: ignore[misc]
        setter.fset(self, optimizers)
        for outer in self._lightning_optimizers:
            # Lightning's wrapper inherits these methods but lacks the attributes that they use.
            for name in _FORWARDED_METHODS:
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
        """Run Lightning's backward, and reduce before anything else sees the gradients."""
        module, precision = self.lightning_module, self.precision_plugin
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._distributed_optimizers.after_backward(module.automatic_optimization)
        return precision.post_backward(closure_loss, module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self._distributed_optimizers.block_reduction():
            yield

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        automatic = self.lightning_module.automatic_optimization
        scaled = getattr(self.precision_plugin, "scaler", None) is not None

        def compute_and_reduce() -> Any:
            loss = closure()
            self._distributed_optimizers.before_step(optimizer, automatic, scaled)
            return self._distributed_optimizers.average_loss(optimizer, loss)

        with self._distributed_optimizers.skip_reduction(optimizer):
            return self.precision_plugin.optimizer_step(
                optimizer,
                model=model or self.lightning_module,
                closure=compute_and_reduce,
                **kwargs,
            )

    # -- collectives and checkpoints -------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduce_tensor(tensor, group, reduce_op)

    def optimizer_state(self, optimizer: Any) -> Any:
        return self.whole_state(optimizer)

    def load_checkpoint(self, checkpoint_path: Any, **keywords: Any) -> Any:
        """Read the checkpoint on the first rank, and give it to all ranks."""
        if hasattr(checkpoint_path, "content"):  # an elastic state's commit: every rank has it
            return checkpoint_path.content()
        read = super().load_checkpoint  # type: ignore[misc]
        return self._read_once(lambda: read(checkpoint_path, **keywords))

    # -- the end ---------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        modules.share_buffers(self.lightning_module, self.process_set)

    def on_train_end(self) -> None:
        self._distributed_optimizers.synchronize_parameters()
        modules.share_buffers(self.lightning_module, self.process_set)

    def _release_optimizers(self) -> None:
        if originals := self._distributed_optimizers.release():
            self.optimizers = originals

    def on_exception(self, exception: BaseException) -> None:
        """Do nothing: the base class gives advice for DistributedDataParallel."""

    def teardown(self) -> None:
        """Leave module, optimizers and Trainer as they would be without Horovod."""
        if self._batch_watcher is not None:
            self._batch_watcher.stop()
            self._batch_watcher = None
        if self._disconnect_metrics is not None:
            self._disconnect_metrics()
            self._disconnect_metrics = None
        self._release_optimizers()
        if self._sync_applied is not None:
            self._sync_applied.revert(self.model)
            self._sync_applied = None
        module = self.lightning_module
        if module is not None and any(param.is_meta for param in module.parameters()):
            # The module was refused because of its meta parameters. The base class would move the
            # module, which fails for these, and that error would hide the reason.
            self._lightning_module = None
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self._lightning_module = module

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Do nothing: the base class would register the names of DDP again."""


_FORWARDED_METHODS = (
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


@functools.cache
def trainer_strategy_class(flavour: Flavour) -> Any:
    """Make the strategy for this package's Trainer.

    It derives from the strategy for DistributedDataParallel because Lightning asks for that class
    where it means "each process has the whole model", for example before it takes compiled modules.
    """
    flavour.require()
    base = flavour.trainer_part("strategies").DDPStrategy
    return join_with_base("HorovodStrategy", TrainerStrategy, base, flavour)
