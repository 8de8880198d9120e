"""Parameters whose update is still to be made, and noticing that somebody is about to use one.

`horovod.torch.optimizers.delayed_update` marks parameters here and makes their updates. A stale
value must not be seen by anybody, so a marked parameter is an instance of `PendingParameter` for
the time being, as torch's own lazy modules have an `UninitializedParameter` until they know its
shape: torch asks the class before it does anything with the tensor, in whatever way the program
came by it (a module's attribute, a list kept since the start, the weight of a child module, another
thread), and the class has the update made first.

Hooks of modules alone would miss whoever uses a parameter outside of its module's forward (a kept
list, `F.linear` with the weight of a head in a loss, `.data`, a copy), and a TorchFunctionMode sees
one thread only and is taken off in place of the program's own by the end of a `with torch.device`
block that began before it. Other memory in place of the parameter's, filled with NaN, would be
noticed only where NaN is: `(param > 0).sum()` would be wrong.

torch does not ask about what takes tensors in C++ without its knowledge: extensions, TorchScript,
`torch.func`. So modules have the updates of their own parameters made before they run, scripted
ones all updates, and so have modules whose parameters somebody iterates over. For this a forward
hook is there while a parameter is marked, and another `Module.named_parameters` while there is an
optimizer with overlap_forward. Programs without one have torch as it is. Nor can anything be
noticed of other tensors with a parameter's memory: see `with_aliases`.
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
        """Make those of these parameters that are its own, by default all, and wait for them."""

    def abandon(self) -> None:
        """Wait for what is under way, and make no update."""


_awaited: dict[Parameter, Updates] = {}  # by the parameters that are marked
lock = threading.RLock()  # held by the thread that marks parameters or makes updates
_hook: Any = None  # notices modules that run, while anything is awaited
_users: weakref.WeakSet[Any] = weakref.WeakSet()  # those for whom iteration is watched
_replacement: Any = None  # of Module.named_parameters, while there are any
_once_at_exit = functools.cache(atexit.register)


class PendingParameter(Parameter):
    """A parameter while it waits for its update."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [value for value in (*args, *kwargs.values()) if type(value) is PendingParameter]
        _eager_finish()(found or None)  # none: in a list or another object, where we do not look
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
    if type(param) is Parameter:  # a class of the user's own may have a reason
        param.__class__ = PendingParameter


def unmark(param: Parameter) -> None:
    """Make it an ordinary parameter again."""
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
    """Return those whose memory other tensors use too, which can be read without our noticing.

    Such as a kept state_dict, `param.detach()`, or an array of NumPy's. A torch that cannot count
    the users of memory has all of them returned: nothing is delayed then, and nothing is wrong.
    """
    count_uses = getattr(torch._C, "_storage_Use_Count", None)
    if count_uses is None:
        return list(params)
    storages = [param.untyped_storage()._cdata for param in params]
    sharing = Counter(storages)  # these parameters themselves: those of an LSTM on a device
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
    """Make no update that is still to be made: e.g. the parameters will be replaced."""
    with lock:
        for updates in dict.fromkeys(_awaited.values()):
            updates.abandon()


@functools.cache
def _eager_finish() -> Callable[..., None]:
    """Return `finish` as it is where torch.compile may be looking: no part of a graph."""
    # Not when this module is loaded, for it loads the compiler.
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
        _once_at_exit(_finish_at_exit)  # before the engine is stopped, for it was there first


def _watched(original: Any) -> Any:
    """Return the method in whose place we are, with updates made before; without users it goes."""

    @functools.wraps(original)
    def named_parameters(self: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        global _replacement
        if _awaited:
            for module in self.modules():
                _before_forward(module, None)
        elif not _users:
            with lock:
                # If another library has put its own in place of ours, that calls ours: it stays.
                if not _users and torch.nn.Module.named_parameters is _replacement:
                    torch.nn.Module.named_parameters = original  # type: ignore[method-assign]
                    _replacement = None
        return original(self, *arguments, **keywords)

    return named_parameters


def _finish_at_exit() -> None:
    """Take part in what other ranks wait for, unless this one has failed."""
    if _awaited and not hasattr(sys, "last_value"):
        try:
            finish()
        except Exception as error:
            logger.warning("the last update was not made: %s", error)
