"""Updates that are made when they are needed, not in `step()`: one for each bucket of gradients.

The optimizer (`horovod.torch.optimizers.delaying`) begins them when the reductions have been
started; `horovod.torch.optimizers.pending` notices who needs a parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from horovod.common.logging import get_logger
from horovod.engine.request import Request
from horovod.torch.gradients.buckets import Bucket
from horovod.torch.gradients.device_bucket import DeviceBucket
from horovod.torch.optimizers import pending
from horovod.torch.optimizers.sliced_update import Slice, SlicedParameter

Parameter = torch.nn.Parameter
Options = dict[str, Any]  # of a parameter group, without its parameters
# Updates parameters, or slices of some, with these options of their groups.
StepOn = Callable[[Sequence[Options], Sequence[Parameter | Slice]], None]

logger = get_logger(__name__)

_LOOK_SECONDS = 1.0  # between looks whether this is still the process that trains


class Update:
    """One bucket's parameters and their gradients, which nobody sees meanwhile."""

    def __init__(self, bucket: Bucket | DeviceBucket) -> None:
        self.bucket = bucket
        self.gradients = [(param, param.grad) for _, param in bucket.params]
        self.cleared = False  # whether zero_grad() was called since
        self.slices = (
            _slices(bucket) if isinstance(bucket, Bucket) else []
        )  # what each request brings, until it has been made use of

    @property
    def params(self) -> list[Parameter]:
        return [param for param, _ in self.gradients]


class StreamOfStep:
    """The stream of a device that was current in `step()`: updates are made there.

    Programs let their other streams wait for that one where they need what a step has made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.current_stream(device) if device.type != "cpu" else None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Make it the current one; whatever is current otherwise waits for what is done in it."""
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
        self._stream: StreamOfStep | None = None  # on a device: where the step was made
        self._process = os.getpid()  # a forked one has no such thread

    def begin(
        self, buckets: Iterable[Bucket | DeviceBucket], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Reductions of these buckets are under way: update the parameters when they are needed.

        Those that backward has hidden entirely are updated at once. The options of the groups are
        those of now, whatever a scheduler makes of them next.
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
                pending.mark(update.params, self)
            self._make(self._reduced())

    def any_left(self) -> bool:
        return bool(self._updates)

    def finish(self, params: Iterable[Parameter] | None = None) -> None:
        with pending.lock:
            found = map(self._updates.get, list(self._updates if params is None else params))
            needed = [update for update in dict.fromkeys(found) if update is not None]
            if needed:
                self._make(list(dict.fromkeys([*needed, *self._reduced()])))

    def clear_gradients(self) -> None:
        """Leave no gradients behind: the program does not want to see them any more."""
        with pending.lock:
            for update in self._updates.values():
                update.cleared = True

    def abandon(self) -> None:
        with pending.lock:
            while self._updates:
                update = next(iter(self._updates.values()))
                self._take_back(update)
                update.bucket.settle()

    def _reduced(self) -> list[Update]:
        """Return those for which nobody would have to wait."""
        updates = dict.fromkeys(self._updates.values())
        return [update for update in updates if update.bucket.is_reduced()]

    def _make(self, updates: Sequence[Update]) -> None:
        """All in one step of the optimizer, each call of which costs something."""
        with contextlib.nullcontext() if self._stream is None else self._stream.used():
            self._make_now(updates)

    def _make_now(self, updates: Sequence[Update]) -> None:
        targets: list[Parameter | Slice] = []
        for update in updates:
            rest = self._use_what_arrives(update)
            self._take_back(update)
            failure = update.bucket.settle()
            if failure is not None:
                logger.warning("the last step is incomplete: not all parameters were updated")
                self.abandon()
                raise failure
            targets += update.params if rest is None else rest
        self._step(targets)
        for update in updates:
            if update.cleared:
                for param, _ in update.gradients:
                    param.grad = None

    def _use_what_arrives(self, update: Update) -> list[Slice] | None:
        """Let its requests end, and update slices with what they bring while others are on the way.

        The slices that are left; None if nothing has been updated yet.
        """
        if isinstance(update.bucket, DeviceBucket):
            return None  # the device waits, and not the host
        requests, slices = update.bucket.requests, update.slices
        begun = False
        for request in requests:
            self._let_end(request)
            arrived = request.done() and request.failure is None
            if slices and arrived and _is_awaited(requests[-1]):
                begun = True
                self._step(slices.pop(0))
        return _joined(slices) if begun else None

    def _step(self, targets: Sequence[Parameter | Slice]) -> None:
        if targets:
            # What a forward pass may have switched on is off: state that is made must be ordinary.
            kind = "cpu" if self._stream is None else self._stream.device.type
            with torch.inference_mode(False), torch.autocast(kind, enabled=False):
                self._step_on(self._options, targets)

    def _let_end(self, request: Request) -> None:
        """Wait for one request beside the engine's thread."""
        while not request.done() and os.getpid() == self._process:
            request.wait_beside(_LOOK_SECONDS)

    def _take_back(self, update: Update) -> None:
        """Make its parameters ordinary ones, which have their gradients."""
        pending.unmark(update.params)
        for param, gradient in update.gradients:
            param.grad = gradient
            del self._updates[param]


def _is_awaited(request: Request) -> bool:
    return not request.done()


def _slices(bucket: Bucket) -> list[list[Slice]]:
    """Return what each of several requests of a bucket brings, if gradients are final with that."""
    if len(bucket.spans) < 2 or bucket.finishers or bucket.gradients() is None:
        return []
    params = [SlicedParameter(param) for _, param in bucket.params]
    return [
        [Slice(params[number], start, stop) for number, start, stop in spans]
        for spans in bucket.spans
    ]


def _joined(slices: Sequence[Sequence[Slice]]) -> list[Slice]:
    """One slice of each parameter in place of several."""
    joined: dict[SlicedParameter, Slice] = {}
    for each in itertools.chain.from_iterable(slices):
        first = joined.setdefault(each.of, each)
        joined[each.of] = first._replace(stop=each.stop)
    return list(joined.values())


def _options(group: Mapping[str, Any]) -> Options:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
