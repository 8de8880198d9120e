"""Snapshots of state dicts that cost one copy. Used by `horovod.torch.elastic.state`.

A snapshot is what ``state_dict()`` returned with every tensor copied to host memory (pinned, for
CUDA tensors). Memory is allocated once: the next snapshot is written over one that is not needed
any more. The one before stays whole until the new one is complete, so there are two, and a third
while a checkpoint is being written.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import OrderedDict
from typing import Any

import torch

Tensor = torch.Tensor

_IMMUTABLE = (int, float, bool, str, bytes, complex, type(None))


class Snapshot:
    """One copy. A thread that reads it beside training holds it meanwhile."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self._holders = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1

    @property
    def is_held(self) -> bool:
        return self._holders > 0


class Snapshots:
    """The snapshots of one object."""

    def __init__(self) -> None:
        self.current: Snapshot | None = None
        self._next: Snapshot | None = None
        self._retired: list[Snapshot] = []

    def prepare(self, value: Any) -> None:
        """Copy `value`; `current` stays what it is."""
        spare = next((each for each in self._retired if not each.is_held), None)
        devices: set[torch.device] = set()
        content = _copied(value, None if spare is None else spare.content, devices)
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()
        if spare is not None:
            self._retired.remove(spare)
        self._next = Snapshot(content)

    def publish(self) -> None:
        """Make the prepared copy the current one."""
        assert self._next is not None, "prepare() comes first"
        if self.current is not None:
            self._retired.append(self.current)
        self.current, self._next = self._next, None

    def take(self, value: Any) -> None:
        self.prepare(value)
        self.publish()


def clone(value: Any) -> Any:
    """Return a copy that shares nothing with `value`."""
    return _copied(value, None, set())


def _copied(value: Any, spare: Any, devices: set[torch.device]) -> Any:
    """Return a copy of `value` in host memory, in those tensors of `spare` that fit.

    Devices that are still copying are added to `devices`.
    """
    if isinstance(value, Tensor):
        return _copied_tensor(value, spare, devices)
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) in (dict, OrderedDict):
        old = spare if isinstance(spare, dict) else {}
        made = type(value)(
            (key, _copied(item, old.get(key), devices)) for key, item in value.items()
        )
        if hasattr(value, "_metadata"):  # the versions of a model's modules
            made._metadata = value._metadata
        return made
    if type(value) in (list, tuple):
        fits = type(spare) is type(value) and len(spare) == len(value)
        spares = spare if fits else [None] * len(value)
        return type(value)(map(_copied, value, spares, itertools.repeat(devices)))
    return copy.deepcopy(value)


def _copied_tensor(tensor: Tensor, spare: Any, devices: set[torch.device]) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.cpu().clone()
    if (
        not isinstance(spare, Tensor)
        or spare.shape != tensor.shape
        or spare.dtype != tensor.dtype
        or (tensor.is_cuda and not spare.is_pinned())
    ):
        spare = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    target: Tensor = spare
    target.copy_(tensor, non_blocking=True)
    if not tensor.is_cpu:
        devices.add(tensor.device)
    return target
