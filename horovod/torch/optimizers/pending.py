"""Parameters whose update is still to be made, and noticing that somebody is about to use one.

`horovod.torch.optimizers.delayed_update` marks parameters here and makes their updates. Nobody may
see a stale value. So a marked parameter is an instance of `PendingParameter` for the time being, as
torch's own lazy modules have an `UninitializedParameter` until they know its shape: before torch
does anything with the tensor it asks the class, which has the update made first. It does not matter
how the program got the tensor (a module's attribute, a list kept since the start, the weight of a
child module, another thread).

Three simpler ways fail. Hooks of modules alone would miss a use outside of the module's forward (a
kept list, `F.linear` with the weight of a head in a loss, `.data`, a copy). A TorchFunctionMode
sees one thread only, and the end of a `with torch.device` block that began before it takes it off
in place of its own. Other memory in place of the parameter's, filled with NaN, is noticed only
where NaN is: `(param > 0).sum()` would be wrong.

torch does not ask where C++ takes tensors without its knowledge: extensions, TorchScript,
`torch.func`. So the updates of a module's own parameters are made before it runs (all updates, if
it is scripted), and before somebody iterates over its parameters. A forward hook sees to that while
a parameter is marked, and another `Module.named_parameters` while there is an optimizer with
overlap_forward. Programs without one have torch as it is. Other tensors that share a parameter's
memory go unnoticed: see `with_aliases`.
"""

from __future__ import annotations

import atexit
import copy
import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from horovod.common.logging import get_logger

Parameter = torch.nn.Parameter

logger = get_logger(__name__)


class Updates(Protocol):
    """The updates of one optimizer."""

    def finish(self, params: Iterable[Parameter] | None = None) -> None:
        """Make the updates of these parameters that are its own, by default all; wait for them."""

    def abandon(self) -> None:
        """Wait for what is under way, and make no update."""


_awaited: dict[Parameter, Updates] = {}  # the updates of marked parameters
lock = threading.RLock()  # held by the thread that marks parameters or makes updates
_hook: Any = None  # notices modules that run, while anything is awaited
_users: weakref.WeakSet[Any] = weakref.WeakSet()  # objects for which iteration is watched
_replacement: Any = None  # stands for Module.named_parameters while there are users
_once_at_exit = functools.cache(atexit.register)


class PendingParameter(Parameter):
    """A parameter while it waits for its update."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [value for value in (*args, *kwargs.values()) if type(value) is PendingParameter]
        _eager_finish()(found or None)  # none found: it is inside another object: finish all
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish([self])
        return copy.deepcopy(self, memo)


def mark(param: Parameter, updates: Updates) -> None:
    """Let nobody use the parameter before `updates` has finished it."""
    global _hook
    if _hook is None:
        _hook = torch.nn.modules.module.register_module_forward_pre_hook(_before_forward)
    _awaited[param] = updates
    if type(param) is Parameter:  # a class of the user's own stays
        param.__class__ = PendingParameter


def unmark(param: Parameter) -> None:
    """Make the parameter an ordinary one again."""
    global _hook
    if is_pending(param):
        param.__class__ = Parameter
    _awaited.pop(param, None)
    if not _awaited and _hook is not None:
        _hook.remove()
        _hook = None


def is_pending(param: Any) -> bool:
    return type(param) is PendingParameter


def with_aliases(params: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters whose memory other tensors use too, which are read unnoticed.

    Such are a kept state_dict, `param.detach()`, or an array of NumPy's. If torch cannot count the
    users of memory, return all of them: nothing is delayed then, and nothing is wrong.
    """
    count_uses = getattr(torch._C, "_storage_Use_Count", None)
    if count_uses is None:
        return list(params)
    storages = [param.untyped_storage()._cdata for param in params]
    sharing = Counter(storages)  # these parameters share some: those of an LSTM on a device do
    return [
        param
        for param, storage in zip(params, storages, strict=True)
        # One more is the object that untyped_storage() has made for Python.
        if count_uses(storage) > sharing[storage] + 1
    ]


def finish(params: Iterable[Parameter] | None = None) -> None:
    """Make the updates of these parameters, by default all in this process."""
    with lock:
        wanted = list(_awaited if params is None else params)
        for updates in dict.fromkeys(map(_awaited.get, wanted)):
            if updates is not None:
                updates.finish(wanted)


def abandon() -> None:
    """Make no update that is still to be made, because parameters are replaced, for example."""
    with lock:
        for updates in dict.fromkeys(_awaited.values()):
            updates.abandon()


@functools.cache
def _eager_finish() -> Callable[..., None]:
    """Return `finish`, marked so that torch.compile makes it no part of a graph."""
    # Made on first use and not when this module is loaded, because it loads the compiler.
    disabled: Callable[..., None] = torch.compiler.disable(finish)  # type: ignore[no-untyped-call]
    return disabled


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    """Make the updates of the module's own parameters; if it is scripted, all."""
    if isinstance(module, torch.jit.ScriptModule):
        _eager_finish()()
        return
    mine = [param for param in module._parameters.values() if type(param) is PendingParameter]
    if mine:
        _eager_finish()(mine)


def watch_iteration(user: object) -> None:
    """Have updates made before modules hand out parameters one by one, while `user` is alive."""
    global _replacement
    with lock:
        _users.add(user)
        if _replacement is None:
            _replacement = _watched(torch.nn.Module.named_parameters)
            torch.nn.Module.named_parameters = _replacement  # type: ignore[method-assign]
        _once_at_exit(_finish_at_exit)  # before the engine stops, which was registered first


def _watched(original: Any) -> Any:
    """Wrap a method of modules so that updates are made first; it removes itself without users."""

    @functools.wraps(original)
    def named_parameters(self: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        global _replacement
        if _awaited:
            for module in self.modules():
                _before_forward(module, None)
        elif not _users:
            with lock:
                # If another library has wrapped ours, its method calls ours, which then stays.
                if not _users and torch.nn.Module.named_parameters is _replacement:
                    torch.nn.Module.named_parameters = original  # type: ignore[method-assign]
                    _replacement = None
        return original(self, *arguments, **keywords)

    return named_parameters


def _finish_at_exit() -> None:
    """Make the last updates, for which other ranks may wait, unless this rank has failed."""
    if _awaited and not hasattr(sys, "last_value"):
        try:
            finish()
        except Exception as error:
            logger.warning("the last update was not made: %s", error)
