"""TorchState: models, optimizers and samplers that survive the loss of ranks.

Each is looked after by a handler, chosen by type from a registry that may be extended.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from horovod.common.elastic import ObjectState
from horovod.engine.runtime import runtime
from horovod.torch.elastic.checkpoint import (
    CheckpointWriter,
    newest_checkpoint,
    newest_number,
    not_plain,
)
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.snapshot import Snapshot, Snapshots, clone
from horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovod.torch.optimizers import pending
from horovod.torch.optimizers.local import LocalStepsOptimizer


class StateHandler(ABC):
    """Saves, restores and synchronises one value of a state. Derive from it for other types."""

    root_rank = 0  # which rank has the value that `sync` gives to all

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def save(self) -> None:
        """Take a snapshot of the value."""

    @abstractmethod
    def restore(self) -> None:
        """Bring the value back to the snapshot."""

    @abstractmethod
    def sync(self) -> None:
        """Give the value of `root_rank` to all ranks. Collective."""

    def set_value(self, value: Any) -> None:
        """Look after another value from now on."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handles values that have a state dict."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.snapshots = Snapshots()
        self.save()

    def save(self) -> None:
        self.snapshots.take(self.value.state_dict())

    @property
    def saved(self) -> Snapshot:
        assert self.snapshots.current is not None, "taken by the constructor"
        return self.snapshots.current

    def restore(self) -> None:
        self.load(self.saved.content)

    def load(self, content: Any) -> None:
        self.value.load_state_dict(content)


class ModelStateHandler(_StateDictHandler):
    """Handles a torch.nn.Module."""

    def sync(self) -> None:
        everything = self.value.state_dict()
        tensors = {k: v for k, v in everything.items() if isinstance(v, torch.Tensor)}
        broadcast_parameters(tensors, self.root_rank)
        if len(tensors) < len(everything):  # modules may keep other things as well
            others = {k: v for k, v in everything.items() if k not in tensors}
            others = broadcast_object(others, self.root_rank, "elastic.model")
            self.value.load_state_dict({**everything, **others})


class OptimizerStateHandler(_StateDictHandler):
    """Handles a torch.optim.Optimizer, also one inside a DistributedOptimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, self.root_rank)

    def load(self, content: Any) -> None:
        # The optimizer keeps the tensors that it is given, and would change the snapshot.
        self.value.load_state_dict(clone(content))


class SamplerStateHandler(_StateDictHandler):
    """Handles an ElasticSampler."""

    def sync(self) -> None:
        state = broadcast_object(self.value.state_dict(), self.root_rank, "elastic.sampler")
        self.value.load_state_dict(state)

    def gather(self) -> None:
        """Learn what the other ranks have processed. Collective."""
        everyones = allgather_object(self.value.processed_indices, name="elastic.indices")
        self.value.processed_indices = set().union(*everyones)


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return types and the handlers of their values, in the order in which they are tried."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use this registry for states made from now on."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a training in PyTorch: ``TorchState(model, optimizer, epoch=0, batch=0)``.

    Models, optimizers and `ElasticSampler` are looked after by handlers; other keyword arguments
    become attributes as in `ObjectState`.

    Args:
        model: The model to carry over.
        optimizer: The optimizer to carry over, distributed or not.
        checkpoint_dir: Directory into which rank 0 also writes every commit. A job that starts
            again goes on from the newest, so rank 0 must find the directory wherever it runs
            then. Attributes must be plain values in that case.
        checkpoints_kept: Number of commits that stay there.

    Raises:
        ValueError: With `checkpoint_dir`: an attribute cannot be written, or the checkpoint is
            of another model.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoints_kept: int = 2,
        **kwargs: Any,
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._checkpoint_dir = checkpoint_dir
        self._writer: CheckpointWriter | None = None
        if checkpoint_dir is not None:
            self._writer = CheckpointWriter(checkpoint_dir, checkpoints_kept)
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = _handler(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        super().__init__(broadcast_object, lambda: runtime.topology.rank, **plain)
        if self._writer is not None:
            self._content()  # raise now if it cannot be written

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        ours = [each for each in self._handlers.values() if isinstance(each, _StateDictHandler)]
        for handler in ours:
            handler.snapshots.prepare(handler.value.state_dict())
        for other in self._handlers.values():
            if not isinstance(other, _StateDictHandler):
                other.save()
        runtime.check_devices()  # what was copied may come from a reduction that was aborted
        super().save()
        for handler in ours:  # all are published, because nothing can fail here
            handler.snapshots.publish()

    def restore(self) -> None:
        if self._local_optimizers() and self._num_syncs() >= 0:
            super().save()  # the steps that this rank took alone are good, whoever was lost
            return
        pending.abandon()  # delayed updates of what is replaced now
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        if self._version < 0 and runtime.topology.rank == self._root:
            self._resume()  # nobody has begun, or another rank would have been chosen
        with self._keeping_local_steps():
            for handler in self._handlers.values():
                handler.root_rank = self._root
                handler.sync()
        super().sync()
        if self._writer is not None:
            self._version = broadcast_object(self._version, self._root, "elastic.version")
        self.save()  # a failure before the next commit must not bring back what was before

    # -- local steps -------------------------------------------------------------------------

    def _local_optimizers(self) -> list[LocalStepsOptimizer]:
        values = [handler.value for handler in self._handlers.values()]
        return [value for value in values if isinstance(value, LocalStepsOptimizer)]

    def _num_syncs(self) -> int:
        """Return how many synchronisations of models this rank has seen; -1: it has not begun."""
        numbers = [optimizer._num_syncs() for optimizer in self._local_optimizers()]
        return -1 if min(numbers) < 0 else sum(numbers)

    @contextlib.contextmanager
    def _keeping_local_steps(self) -> Iterator[None]:
        """Let ranks that took part in the last synchronisation keep their steps since then.

        Inside, all get the state of a rank that took part. The others go back to where all ranks
        were after that synchronisation. Collective; nothing happens before local steps have begun.
        """
        optimizers = self._local_optimizers()
        numbers = allgather_object(self._num_syncs(), "elastic.syncs") if optimizers else [-1]
        newest = max(numbers)
        if newest < 0:
            yield
            return
        self._root = numbers.index(newest)
        self.gather()
        is_newest = self._num_syncs() == newest
        own = [
            handler
            for handler in self._handlers.values()
            if isinstance(handler, (ModelStateHandler, OptimizerStateHandler))
        ]
        for handler in own:
            handler.save()
        yield
        schedules = [optimizer._schedule() for optimizer in optimizers]
        for handler in own if is_newest else ():
            handler.restore()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer._adopt_schedule(schedule)
            if not is_newest:
                optimizer._return_to_anchor()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def gather(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.gather()

    # -- on disk -----------------------------------------------------------------------------

    def on_commit(self) -> None:
        if self._writer is not None and runtime.topology.rank == 0:
            handlers = self._handlers.values()
            saved = [each.saved for each in handlers if isinstance(each, _StateDictHandler)]
            self._writer.submit(self._version, self._content(), saved)

    def _content(self) -> dict[str, Any]:
        """Return the last commit as it goes to disk; raise ValueError if something in it cannot."""
        problem = not_plain(self._saved_state, "state")
        values = {}
        for name, handler in self._handlers.items():
            if isinstance(handler, _StateDictHandler):
                values[name] = handler.saved.content
                problem = problem or not_plain(handler.saved.content, f"state.{name}")
            else:
                problem = problem or f"state.{name} has a {type(handler).__name__}"
        if problem is not None:
            raise ValueError(
                f"checkpoint_dir was given, but checkpoints hold only tensors, numbers, texts and "
                f"lists, tuples and dicts of them, and {problem}"
            )
        return {"values": values, "attributes": clone(self._saved_state)}

    def _resume(self) -> None:
        if self._checkpoint_dir is None:
            return
        self._version = newest_number(self._checkpoint_dir)  # go on counting, whatever can be read
        found = newest_checkpoint(self._checkpoint_dir)
        if found is None:
            return
        path, content = found
        try:
            for name, handler in self._handlers.items():
                if isinstance(handler, _StateDictHandler) and name in content["values"]:
                    handler.load(content["values"][name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"the checkpoint {path} does not fit this state: {error}. Use another "
                f"checkpoint_dir for another model"
            ) from error
        for name in self._saved_state:
            if name in content["attributes"]:
                setattr(self, name, content["attributes"][name])
        self.save()


def _handler(value: Any) -> StateHandler | None:
    found = (handler(value) for kind, handler in _registry if isinstance(value, kind))
    return next(found, None)
