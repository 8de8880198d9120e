"""Checks a module before training, and prepares it: the same on all ranks, with SyncBatchNorm."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import horovod.torch as hvd
from horovod.common.process_sets import ProcessSet
from horovod.lightning.collectives import without_inference_mode
from horovod.lightning.flavours import Flavour
from horovod.torch.optimizers.checks import first_difference, takes_part


def check_usable(module: torch.nn.Module) -> None:
    """Refuse modules that cannot be trained as equal copies on all ranks."""
    for name, child in module.named_modules():
        if type(child).__name__ in ("FullyShardedDataParallel", "DistributedDataParallel"):
            raise ValueError(
                f"strategy='horovod' averages gradients itself, and {name or 'the module'!r} is a "
                f"{type(child).__name__}: pass the module that is inside"
            )
    for name, param in module.named_parameters():
        if hasattr(param, "device_mesh"):
            raise ValueError(
                f"strategy='horovod' needs the whole module on every rank, and parameter {name!r} "
                f"is spread over ranks (a {type(param).__name__}, as FSDP makes them): use "
                f"HorovodStrategy(shard_state=True) to spread the optimizer state"
            )
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet (a lazy module): run a batch through the "
                f"module first, for example in configure_model()"
            )
        if param.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the device 'meta', so it has no values: make the module "
                f"outside of torch.device('meta'), or fill it in configure_model()"
            )


def check_devices(module: torch.nn.Module, optimizers: list[Any], device: torch.device) -> None:
    """Refuse parameters that are not on the device of this rank."""
    named = dict(module.named_parameters())
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for param in group["params"]:
                named.setdefault(f"an optimizer's parameter {list(param.shape)}", param)
    for name, param in named.items():
        any_index = device.index is None  # the CPU, or the only GPU of the program
        if param.device != device and not (any_index and param.device.type == device.type):
            raise ValueError(
                f"parameter {name!r} of the module is on {param.device}, and rank {hvd.rank()} "
                f"computes on {device}: make parameters in __init__ or configure_model(), from "
                f"where they are moved, or move this one to self.device"
            )


def check_alike(module: torch.nn.Module, process_set: ProcessSet) -> None:
    """Refuse modules that differ between ranks, on every rank. Collective."""
    mine = [
        (name, tuple(entry.shape), str(entry.dtype).removeprefix("torch."), ())
        if isinstance(entry, torch.Tensor)
        else (name, (), type(entry).__name__, ())
        for name, entry in module.state_dict().items()
    ]
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=8).hexdigest()
    collective = "lightning.module"
    if len(set(hvd.allgather_object(digest, collective, process_set))) == 1:
        return
    everyone = hvd.allgather_object(mine, collective, process_set)
    ranks = process_set.ranks or list(range(len(everyone)))
    other = next(index for index, theirs in enumerate(everyone) if theirs != everyone[0])
    raise ValueError(
        f"the modules of ranks {ranks[0]} and {ranks[other]} differ: "
        + first_difference(everyone[0], everyone[other])
    )


def share_values(module: torch.nn.Module, process_set: ProcessSet) -> None:
    """Check that all ranks have the same module, and give them the values of the first rank."""
    if not takes_part(process_set):
        return
    check_alike(module, process_set)
    root = (process_set.ranks or [0])[0]
    state = module.state_dict()
    tensors = {name: entry for name, entry in state.items() if isinstance(entry, torch.Tensor)}
    _broadcast(tensors, process_set)
    if len(tensors) < len(state):  # modules may keep other things as well
        others = {name: entry for name, entry in state.items() if name not in tensors}
        others = hvd.broadcast_object(others, root, "lightning.extra_state", process_set)
        module.load_state_dict({**state, **others})


def share_buffers(module: torch.nn.Module, process_set: ProcessSet) -> None:
    """Give all ranks the buffers of the first rank, such as running statistics of its own data.

    DDP does so before every forward pass. Only evaluation uses such statistics, so once before each
    evaluation is enough.
    """
    buffers = dict(module.named_buffers())
    if buffers and takes_part(process_set):
        _broadcast(buffers, process_set)


def _broadcast(tensors: dict[str, torch.Tensor], process_set: ProcessSet) -> None:
    """Overwrite the tensors with those of the first rank. Collective."""
    root = (process_set.ranks or [0])[0]
    with without_inference_mode():
        handles = [
            hvd.broadcast_async_(tensor.detach(), root, f"lightning.module.{name}", process_set)
            for name, tensor in tensors.items()
        ]
        for handle in handles:
            hvd.synchronize(handle)


def choose_layer_sync(plugin: Any, flavour: Flavour, process_set: ProcessSet) -> Any:
    """Return the plugin for ``Trainer(sync_batchnorm=True)``: ours in place of Lightning's own."""
    default = flavour.trainer_part("plugins.layer_sync").TorchSyncBatchNorm
    return HorovodSyncBatchNorm(process_set) if type(plugin) is default else plugin


class HorovodSyncBatchNorm:
    """Replaces the batch normalisation layers of a module, and puts them back after training."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._replaced_layers: list[tuple[Any, str, Any]] = []  # parent, name in it, layer

    def apply(self, model: torch.nn.Module) -> Any:
        self._replaced_layers = [
            (module, name, child)
            for module in model.modules()
            for name, child in module._modules.items()
            if isinstance(child, _BatchNorm) and not isinstance(child, hvd.SyncBatchNorm)
        ]
        return hvd.SyncBatchNorm.convert_sync_batchnorm(model, self._process_set)

    def revert(self, model: torch.nn.Module) -> Any:
        """Put the original layers back, with the values that were learned meanwhile."""
        for module, name, layer in self._replaced_layers:
            trained = module._modules[name]
            # Parameters are the same objects; buffers may have been moved to another device.
            layer._parameters, layer._buffers = trained._parameters, trained._buffers
            layer.train(trained.training)
            module._modules[name] = layer
        self._replaced_layers = []
        return model
