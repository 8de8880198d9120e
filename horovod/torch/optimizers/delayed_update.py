"""Updates that are made when they are needed, not in `step()`: one for each bucket of gradients.

The optimizer (`horovod.torch.optimizers.delaying`) begins them when the reductions have been
started; `horovod.torch.optimizers.pending` notices that a parameter is needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from horovod.common.logging import get_logger
from horovod.torch.gradients.buckets import Bucket
from horovod.torch.gradients.device_bucket import DeviceBucket
from horovod.torch.optimizers import pending

Parameter = torch.nn.Parameter
Options = dict[str, Any]  # of a parameter group, without its parameters
StepOn = Callable[[Sequence[Options], set[Parameter]], None]  # updates these parameters

logger = get_logger(__name__)

_LOOK_SECONDS = 1.0  # between looks whether this process was forked from the one that trains


class Update:
    """One bucket's parameters and their gradients, which are hidden from the program meanwhile."""

    def __init__(self, bucket: Bucket | DeviceBucket) -> None:
        self.bucket = bucket
        self.gradients = [(param, param.grad) for _, param in bucket.params]
        self.cleared = False  # whether zero_grad() was called since


class StreamOfStep:
    """The stream of a device that was current in `step()`: updates are made there.

    Programs let their other streams wait for that one before they use what a step has made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.current_stream(device) if device.type != "cpu" else None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Make it current in the block; the stream that was current then waits for its work."""
        current = None if self._stream is None else self._module.current_stream(self.device)
        if current is None or current == self._stream:
            yield
            return
        with self._module.stream(self._stream):
            yield
        current.wait_stream(self._stream)


class DelayedUpdates:
    """The updates of one optimizer's last step that are still to be made."""

    def __init__(self, step_on: StepOn) -> None:
        self._step_on = step_on
        self._options: list[Options] = []
        self._updates: dict[Parameter, Update] = {}
        self._stream: StreamOfStep | None = None  # the stream of a step on a device
        self._process = os.getpid()  # a forked one has no thread that reduces

    def begin(
        self, buckets: Iterable[Bucket | DeviceBucket], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Delay the updates of buckets, whose reductions are under way, until they are needed.

        Buckets that are reduced already are updated at once. Updates use the options that the
        groups have now, whatever a scheduler makes of them next.
        """
        with pending.lock:
            self._options = [_options(group) for group in groups]
            self._stream = None
            for bucket in buckets:
                if isinstance(bucket, DeviceBucket):
                    self._stream = StreamOfStep(bucket.device)
                update = Update(bucket)
                for param, _ in update.gradients:
                    param.grad = None
                    self._updates[param] = update
                    pending.mark(param, self)
            self._make(self._reduced())

    def finish(self, params: Iterable[Parameter] | None = None) -> None:
        """Make the updates of these parameters, by default all, and wait for them."""
        with pending.lock:
            found = map(self._updates.get, list(self._updates if params is None else params))
            needed = [update for update in dict.fromkeys(found) if update is not None]
            if needed:
                self._make(list(dict.fromkeys([*needed, *self._reduced()])))

    def clear_gradients(self) -> None:
        """Let updates leave no gradients behind, because the program has cleared them."""
        with pending.lock:
            for update in self._updates.values():
                update.cleared = True

    def abandon(self) -> None:
        """Wait for what is under way, and make no update."""
        with pending.lock:
            while self._updates:
                update = next(iter(self._updates.values()))
                self._take_back(update)
                update.bucket.settle()

    def _reduced(self) -> list[Update]:
        """Return the updates for which nobody would have to wait."""
        updates = dict.fromkeys(self._updates.values())
        return [update for update in updates if update.bucket.is_reduced()]

    def _make(self, updates: Sequence[Update]) -> None:
        """Make these updates in one step of the optimizer, each call of which costs something."""
        if not updates:
            return
        with contextlib.nullcontext() if self._stream is None else self._stream.used():
            for update in updates:
                self._let_arrive(update)
                self._take_back(update)
                failure = update.bucket.settle()
                if failure is not None:
                    logger.warning("the last step is incomplete: not all parameters were updated")
                    self.abandon()
                    raise failure
            # A forward pass may have these on, but new state must be made of ordinary tensors.
            kind = "cpu" if self._stream is None else self._stream.device.type
            with torch.inference_mode(False), torch.autocast(kind, enabled=False):
                params = {param for update in updates for param, _ in update.gradients}
                self._step_on(self._options, params)
            for update in updates:
                if update.cleared:
                    for param, _ in update.gradients:
                        param.grad = None

    def _let_arrive(self, update: Update) -> None:
        """Wait for a bucket while the engine's thread goes on with the next one.

        For a bucket on a device it is the device that waits, in `settle`, and not the host.
        """
        if isinstance(update.bucket, Bucket):
            for request in update.bucket.requests:
                while not request.done() and os.getpid() == self._process:
                    request.wait_beside(_LOOK_SECONDS)

    def _take_back(self, update: Update) -> None:
        """Make the update's parameters ordinary ones again, with their gradients."""
        for param, gradient in update.gradients:
            pending.unmark(param)
            param.grad = gradient
            del self._updates[param]


def _options(group: Mapping[str, Any]) -> Options:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
