"""``Trainer(sync_batchnorm=True)``: Horovod's SyncBatchNorm while a module is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import horovod.torch as hvd
from horovod.common.process_sets import ProcessSet
from horovod.lightning.flavours import Flavour


def layer_sync(asked: Any, flavour: Flavour, process_set: ProcessSet) -> Any:
    """What stands for Lightning's plugin: ours for torch's, any other is the program's own."""
    kind = flavour.trainer_part("plugins.layer_sync").TorchSyncBatchNorm
    return HorovodSyncBatchNorm(process_set) if type(asked) is kind else asked


class HorovodSyncBatchNorm:
    """Replaces the batch normalisations of a module, and puts them back."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._replaced: list[tuple[Any, str, Any]] = []  # module, name in it, the layer before

    def apply(self, model: torch.nn.Module) -> Any:
        self._replaced = [
            (module, name, child)
            for module in model.modules()
            for name, child in module._modules.items()
            if isinstance(child, _BatchNorm) and not isinstance(child, hvd.SyncBatchNorm)
        ]
        return hvd.SyncBatchNorm.convert_sync_batchnorm(model, self._process_set)

    def revert(self, model: torch.nn.Module) -> Any:
        """The layers from before, with what was learned since."""
        for module, name, layer in self._replaced:
            trained = module._modules[name]
            # Parameters are the same objects; buffers may have been moved to another device.
            layer._parameters, layer._buffers = trained._parameters, trained._buffers
            layer.train(trained.training)
            module._modules[name] = layer
        self._replaced = []
        return model
