"""What the strategies for Trainer and Fabric have in common: options, ranks, devices, optimizers.

Mixed in before Lightning's own classes by `horovod.lightning.flavours`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

import horovod.torch as hvd
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.lightning import devices, flavours
from horovod.lightning.collectives import Collectives
from horovod.lightning.flavours import Flavour
from horovod.lightning.optimizers import Optimizers
from horovod.lightning.options import Options
from horovod.torch.compression import Compression, Compressor
from horovod.torch.hooks.base import CommunicationHook
from horovod.torch.outer import OuterSGD

# Precision plugins that belong to strategies which spread a model over devices.
_FOREIGN_PRECISION = ("FSDPPrecision", "DeepSpeedPrecision", "XLAPrecision")

_OF_ALL_STRATEGIES = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"}


class HorovodBase(Collectives):
    """Every rank has the whole module and one device; Horovod averages the gradients."""

    is_horovod = True
    precision_argument: str  # how Lightning calls the precision plugin here
    flavour: Flavour
    accelerator: Any
    parallel_devices: list[torch.device] | None

    def __init__(
        self,
        *,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        shard_state: bool = False,
        communication_hook: CommunicationHook | None = None,
        local_steps: int | None = None,
        outer: OuterSGD | None = None,
        warmup_steps: int = 0,
        average_state: bool = False,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        within: ProcessSet | Literal["host"] | None = None,
        join: bool = False,
        **lightning: Any,
    ) -> None:
        """The options of `hvd.DistributedOptimizer`, and `join`, for ranks with different numbers
        of batches; `lightning`: what all of Lightning's strategies take (``checkpoint_io``, ...).
        """
        options: dict[str, Any] = {
            "compression": compression,
            "backward_passes_per_step": backward_passes_per_step,
            "op": op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "num_groups": num_groups,
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
            "process_set": process_set,
            "shard_state": shard_state,
            "communication_hook": communication_hook,
            "local_steps": local_steps,
            "outer": outer,
            "warmup_steps": warmup_steps,
            "average_state": average_state,
            "fragments": fragments,
            "delay": delay,
            "alpha": alpha,
            "within": within,
        }
        unknown = sorted(set(lightning) - _OF_ALL_STRATEGIES - {self.precision_argument})
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(unknown)}")
        self.given = {**options, "join": join, **lightning}  # to make another one like this
        self.process_set = process_set
        self.join = join
        if join and process_set is not global_process_set:
            raise ValueError("join=True works with all ranks, not with a process_set")
        if join and local_steps is not None:
            raise ValueError(
                "join=True does not go with local_steps, with which all ranks take as many steps"
            )
        self._options = Options(**options)
        self._reduced = Optimizers(self._options)
        lightning.setdefault("cluster_environment", flavours.environment(self.flavour)(process_set))
        super().__init__(**lightning)
        self._num_nodes = 1  # as asked for: set by Lightning

    # -- who and where ---------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Somebody else has started the processes."""
        self._launcher = None

    def _check_place(self) -> None:
        """Start Horovod, and compare the job with what Lightning was asked for."""
        hvd.init()
        if self.process_set is not global_process_set and self.process_set.size() is None:
            raise ValueError(
                f"{self.process_set} is not registered: pass it to hvd.init(process_sets=[...]) "
                f"before the strategy is used"
            )
        devices.check_counts(
            self.parallel_devices or [torch.device("cpu")], self._num_nodes, self.accelerator
        )
        self._place_precision()

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None, "set by the Trainer or by Fabric"
        return devices.own_device(self.parallel_devices)

    @property
    def num_nodes(self) -> int:
        return hvd.cross_size() if hvd.is_initialized() else self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return hvd.local_size()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    global_rank: int  # Lightning's, from the cluster environment

    def _tell_rank(self) -> None:
        """Let messages and files of Lightning come from the first rank only."""
        for part in (self.flavour.fabric_part("utilities.rank_zero"), _rank_zero()):
            part.rank_zero_only.rank = self.global_rank

    def _check_precision(self, plugin: Any) -> None:
        if type(plugin).__name__ in _FOREIGN_PRECISION:
            raise ValueError(
                f"strategy='horovod' keeps the whole module on every rank, and "
                f"{type(plugin).__name__} is for strategies that spread it: use precision=... or "
                f"another plugin"
            )

    def _place_precision(self) -> None:
        """Mixed precision on this rank's device: what Lightning does not know it takes for CUDA."""
        plugin: Any = getattr(self, self.precision_argument)
        kind = self.root_device.type
        if getattr(plugin, "device", None) != "cuda" or kind == "cuda":
            return
        plugin.device = kind
        if plugin.scaler is not None:
            plugin.scaler = torch.amp.GradScaler(kind)

    # -- checkpoints -----------------------------------------------------------------------

    def whole_state(self, optimizer: Any) -> Any:
        """The state of an optimizer as it is saved; if it is sharded, on the first rank only."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if getattr(optimizer, "_shards", None) is not None:
            ranks = self.process_set.ranks or [0]
            optimizer.consolidate_state_dict(to=ranks[0])
            return optimizer.state_dict() if self.global_rank == 0 else {}
        return optimizer.state_dict()

    def _read_once(self, read: Any) -> Any:
        """What the first rank reads; the others need not see its disk. Collective."""
        found: Any = None
        problem: BaseException | None = None
        if self.global_rank == 0:
            try:
                found = read()
            except Exception as error:  # the others must hear of it
                problem = error
        told = self.broadcast(None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        if told is not None:
            raise RuntimeError(f"the first rank could not read the checkpoint: {told}")
        return self.broadcast(found)


def _rank_zero() -> Any:
    from lightning_utilities.core import rank_zero

    return rank_zero
