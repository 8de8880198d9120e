"""The base of the strategies for Trainer and Fabric: options, ranks, devices and optimizers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch

import horovod.torch as hvd
from horovod.common.local_steps import OuterSGD
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.lightning.accelerator import device_count
from horovod.lightning.collectives import Collectives
from horovod.lightning.environment import environment_class
from horovod.lightning.flavours import Flavour
from horovod.lightning.optimizers import Optimizers
from horovod.torch.compression import Compression, Compressor
from horovod.torch.hooks.base import CommunicationHook
from horovod.torch.optimizers.options import TorchOptions

# Precision plugins of strategies that spread one model over several devices.
_FOREIGN_PRECISION = ("FSDPPrecision", "DeepSpeedPrecision", "XLAPrecision")

_LIGHTNING_OPTIONS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"}


class HorovodBase(Collectives):
    """A strategy in which every rank has the whole module, and Horovod averages the gradients.

    Mixed in before a strategy class of Lightning.
    """

    is_horovod = True
    precision_argument: str  # Lightning's name for the precision plugin of this strategy
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
        """Take the options of `hvd.DistributedOptimizer`, `join`, and options of Lightning.

        The docstring of `TrainerStrategy` explains each of them.
        """
        # Those that mean the same to every strategy of ours. The others are objects of Lightning.
        self.given_arguments = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "lightning", "__class__")
        }
        unknown = sorted(set(lightning) - _LIGHTNING_OPTIONS - {self.precision_argument})
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(unknown)}")
        self._options = TorchOptions.from_arguments(self.given_arguments)
        self.process_set = process_set
        self.join = join
        if join and process_set is not global_process_set:
            raise ValueError("join=True works with all ranks, not with a process_set")
        if join and local_steps is not None:
            raise ValueError(
                "join=True does not go with local_steps, with which all ranks take as many steps"
            )
        self._distributed_optimizers = Optimizers(self._options)
        lightning.setdefault("cluster_environment", environment_class(self.flavour)(process_set))
        super().__init__(**lightning)
        self._num_nodes = 1  # what the program asked for; Lightning sets it

    # -- ranks and devices -----------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Set no launcher: the processes run already."""
        self._launcher = None

    def _check_job(self) -> None:
        """Start Horovod, and compare the job with the Trainer's or Fabric's arguments."""
        hvd.init()
        if self.process_set is not global_process_set and self.process_set.size() is None:
            raise ValueError(
                f"{self.process_set} is not registered: pass it to hvd.init(process_sets=[...]) "
                f"before the strategy is used"
            )
        _check_counts(
            self.parallel_devices or [torch.device("cpu")], self._num_nodes, self.accelerator
        )
        self._move_precision()

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None, "set by the Trainer or by Fabric"
        return _own_device(self.parallel_devices)

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

    global_rank: int  # Lightning's property, which asks the cluster environment

    def _announce_rank(self) -> None:
        """Tell Lightning this process's rank, so that only the first rank writes messages."""
        for part in (self.flavour.fabric_part("utilities.rank_zero"), _rank_zero()):
            part.rank_zero_only.rank = self.global_rank

    def _check_precision(self, plugin: Any) -> None:
        if type(plugin).__name__ in _FOREIGN_PRECISION:
            raise ValueError(
                f"strategy='horovod' keeps the whole module on every rank, and "
                f"{type(plugin).__name__} is for strategies that spread it: use precision=... or "
                f"another plugin"
            )

    def _move_precision(self) -> None:
        """Move mixed precision to this rank's device, where Lightning has assumed CUDA."""
        plugin: Any = getattr(self, self.precision_argument)
        kind = self.root_device.type
        if getattr(plugin, "device", None) != "cuda" or kind == "cuda":
            return
        plugin.device = kind
        if plugin.scaler is not None:
            plugin.scaler = torch.amp.GradScaler(kind)

    # -- checkpoints -----------------------------------------------------------------------

    def whole_state(self, optimizer: Any) -> Any:
        """Return the state of an optimizer for a checkpoint; a sharded one on the first rank only.

        If the state is sharded, this is a collective, and the other ranks get an empty state.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if getattr(optimizer, "_shards", None) is not None:
            ranks = self.process_set.ranks or [0]
            optimizer.consolidate_state_dict(to=ranks[0])
            return optimizer.state_dict() if self.global_rank == 0 else {}
        return optimizer.state_dict()

    def _read_once(self, read: Any) -> Any:
        """Call `read` on the first rank, and return its result on all ranks. Collective.

        So the other ranks need not see the first rank's disk.
        """
        content: Any = None
        problem: BaseException | None = None
        if self.global_rank == 0:
            try:
                content = read()
            except Exception as error:  # raised below: the other ranks wait for the broadcast
                problem = error
        message = None if problem is None else f"{type(problem).__name__}: {problem}"
        message = self.broadcast(message)
        if problem is not None:
            raise problem
        if message is not None:
            raise RuntimeError(f"the first rank could not read the checkpoint: {message}")
        return self.broadcast(content)


def _rank_zero() -> Any:
    from lightning_utilities.core import rank_zero

    return rank_zero


def _check_counts(devices: list[torch.device], num_nodes: int, accelerator: Any) -> None:
    """Raise a ValueError that says what to write if the job does not fit the arguments.

    Without Horovod, Lightning starts ``devices`` processes on each of ``num_nodes`` nodes. With
    Horovod a launcher has started the processes, so the arguments can only agree with the job or
    contradict it. Either may be left out. ``devices=1``, which Lightning 1.x asked for with
    Horovod, is accepted too: every process has one device.
    """
    count, here, nodes = len(devices), hvd.local_size(), hvd.cross_size()
    # Without an argument Lightning takes all devices of the machine, possibly more than its ranks.
    all_devices = 0 if accelerator is None else int(accelerator.auto_device_count())
    if count not in (1, here, all_devices):
        if hvd.size() == 1:
            raise ValueError(
                f"devices={count} with strategy='horovod', but this process was not started by a "
                f"launcher, so it is alone. Start {count} of them, without devices: "
                f"horovodrun -np {count * num_nodes} python {_script()}"
            )
        raise ValueError(
            f"devices={count}, but the job has {here} process(es) on the node of rank "
            f"{hvd.rank()}. Leave devices out, or write devices={here}; how many there are is "
            f"said to the launcher: horovodrun -np {count * nodes} python {_script()}"
        )
    if num_nodes not in (1, nodes):
        if hvd.size() == 1:
            raise ValueError(
                f"num_nodes={num_nodes} with strategy='horovod', but this process was not started "
                f"by a launcher, so it is alone. Start the job on {num_nodes} hosts, without "
                f"num_nodes: horovodrun -np {count * num_nodes} -H host1:{count},... "
                f"python {_script()}"
            )
        raise ValueError(
            f"num_nodes={num_nodes}, but the job runs on {nodes} node(s): leave num_nodes out, or "
            f"write num_nodes={nodes}"
        )


def _own_device(devices: list[torch.device]) -> torch.device:
    """Return the device of this rank."""
    local, here = hvd.local_rank(), hvd.local_size()
    first = devices[0]
    if first.type == "cpu":
        return first
    if len(devices) == 1 and here > 1 and not first.index:
        # devices=1 means one for each process: local rank i takes device i.
        return torch.device(first.type, local % device_count())
    return devices[local % len(devices)]


def _script() -> str:
    """Return the program's path, for commands in error messages."""
    return sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script.py"
