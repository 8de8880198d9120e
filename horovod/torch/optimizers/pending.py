"""Parameters whose update is still to be made, and noticing that somebody is about to use one.

`horovod.torch.optimizers.delayed_update` marks parameters here and makes their updates. A stale
value must not be seen by anybody, so a marked parameter is an instance of `PendingParameter` for
the time being: torch asks the class before it does anything with the tensor, in whatever way the
program came by it (a module's attribute, a list kept since the start, the weight of a child module,
another thread), and the class has the update made first. What torch does not ask about are
extensions that take tensors in C++, so modules have the updates of their own parameters made before
they run, and so has whoever iterates over a model's parameters.

Hooks of modules alone would miss whoever uses a parameter outside of its module's forward (a kept
list, `F.linear` with the weight of a head in a loss, `.data`, a copy), and a TorchFunctionMode sees
one thread only and is taken off in place of the program's own by the end of a `with torch.device`
block that began before it. What is replaced and hooked here is so from the first parameter that is
marked on, so nothing changes for programs without overlap_forward.
"""

from __future__ import annotations

import atexit
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from horovod.common.logging import get_logger

Parameter = torch.nn.Parameter

logger = get_logger(__name__)


class Updates(Protocol):
    """Who has updates to make."""

    def finish(self, params: Iterable[Parameter] | None = None) -> None:
        """Make the updates of these parameters, by default all; returns when they are made."""

    def abandon(self) -> None:
        """Wait for what is under way, and make no update."""


_awaited: dict[Parameter, Updates] = {}  # by the parameters that are marked
lock = threading.RLock()  # held by the thread that marks parameters or makes updates
_hook: Any = None  # notices modules that run, while anything is awaited


class PendingParameter(Parameter):
    """What a parameter is while it waits for its update."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found: list[Parameter] = []
        _collect(args, found)
        _collect(kwargs, found)
        _eager_finish()(found or None)  # none: hidden in an object that we cannot look into
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish([self])
        return self.__reduce_ex__(protocol)


def mark(params: Iterable[Parameter], updates: Updates) -> None:
    """These parameters are to be used by nobody before `updates` has finished them."""
    global _hook
    with lock:
        if _hook is None:
            _watch_iteration()
            _hook = torch.nn.modules.module.register_module_forward_pre_hook(_before_forward)
        for param in params:
            _awaited[param] = updates
            param.__class__ = PendingParameter


def unmark(params: Iterable[Parameter]) -> None:
    """They are ordinary parameters again."""
    global _hook
    with lock:
        for param in params:
            param.__class__ = Parameter
            _awaited.pop(param, None)
        if not _awaited and _hook is not None:
            _hook.remove()
            _hook = None


def is_pending(param: Any) -> bool:
    return type(param) is PendingParameter


def finish(params: Iterable[Parameter] | None = None) -> None:
    """Make the updates of these parameters, by default all in this process."""
    with lock:
        wanted: dict[Updates, list[Parameter]] = {}
        for param in list(_awaited if params is None else params):
            updates = _awaited.get(param)
            if updates is not None:
                wanted.setdefault(updates, []).append(param)
        for updates, theirs in wanted.items():
            updates.finish(theirs)


@functools.cache
def _eager_finish() -> Callable[..., None]:
    """The same where torch.compile may be looking: no part of a graph."""
    # Not when this module is loaded, for it loads the compiler.
    disabled: Callable[..., None] = torch.compiler.disable(finish)  # type: ignore[no-untyped-call]
    return disabled


def abandon() -> None:
    """Make no update that is still to be made: e.g. the parameters will be replaced."""
    with lock:
        for updates in dict.fromkeys(_awaited.values()):
            updates.abandon()


def _collect(value: Any, found: list[Parameter]) -> None:
    """Add the marked parameters in `value` to `found`."""
    if type(value) is PendingParameter:
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    """Make the updates of the module's own parameters."""
    mine = [param for param in module._parameters.values() if type(param) is PendingParameter]
    if mine:
        _eager_finish()(mine)


@functools.cache
def _watch_iteration() -> None:
    """Let updates be made before a module hands out its parameters one by one."""
    named_parameters = torch.nn.Module.named_parameters

    @functools.wraps(named_parameters)
    def finished(self: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if _awaited:
            for module in self.modules():
                _before_forward(module, None)
        return named_parameters(self, *arguments, **keywords)

    torch.nn.Module.named_parameters = finished  # type: ignore[method-assign]
    atexit.register(_finish_at_exit)  # before the engine is stopped, for it was there first


def _finish_at_exit() -> None:
    """Take part in what other ranks wait for, unless this one has failed."""
    if _awaited and not hasattr(sys, "last_value"):
        try:
            finish()
        except Exception as error:
            logger.warning("the last update was not made: %s", error)
