"""Puts Horovod's SyncBatchNorm into a module in training, for ``Trainer(sync_batchnorm=True)``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import horovod.torch as hvd
from horovod.common.process_sets import ProcessSet
from horovod.lightning.flavours import Flavour


def choose_layer_sync(plugin: Any, flavour: Flavour, process_set: ProcessSet) -> Any:
    """Return our plugin in place of Lightning's default one; return any other plugin unchanged."""
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
