"""Collectives inside compiled programs: a JAX primitive whose calls run in the program's order.

All ranks must run the same collectives in the same order, but XLA runs calls that do not depend on
each other in any order. So the primitive has an ordered effect: JAX passes a token through all
calls, within a program and from one program to the next. The compiled program calls `_run` with the
addresses of arguments and results (see `xla_ffi`). On a GPU `_run` enqueues its work on the
program's stream and does not wait for it.

JAX has no public way to declare an ordered effect. Only this module imports JAX's internals.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import torch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.runtime import runtime
from horovod.jax.call import Call, fill, from_text
from horovod.jax.compiled import xla_ffi

try:
    from jax._src import effects
    from jax._src.core import abstract_token
    from jax._src.dispatch import runtime_tokens
except ImportError as error:
    raise ImportError(
        f"horovod.jax was written for JAX 0.9 and 0.10 and does not find its way in "
        f"{jax.__version__}: pip install 'horovod[jax]' chooses one that works"
    ) from error


class _Collectives(effects.Effect):
    """The effect of a collective, in which other ranks take part."""

    def __str__(self) -> str:
        return "Horovod"


_effect = _Collectives()
for _allowed in (
    effects.ordered_effects,
    effects.shardable_ordered_effects,  # so that `_check_devices` can explain the error itself
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(_Collectives)


# -- the primitive ---------------------------------------------------------------------------

collective: Any = Primitive("horovod_collective")
collective.multiple_results = True


@dataclasses.dataclass(frozen=True)
class HostFunction:
    """A function of torch tensors that a program calls like a collective.

    Its results have the shapes and types of its arguments. It returns new tensors, or its arguments
    with new values. Programs run such functions in any order, so the function must give names to
    its requests to the engine, and must not have two requests of one name at the same time.
    """

    is_ordered: ClassVar[bool] = False
    kind: ClassVar[str] = "function"

    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    key: str

    def to_text(self) -> str:
        return self.key


_functions: weakref.WeakValueDictionary[bytes, HostFunction] = weakref.WeakValueDictionary()
_numbers = itertools.count()
# The prefix of this process's keys. A stored program that another process compiled contains another
# prefix, by which `_execute` notices that it cannot run it.
_PROCESS = f"function {os.getpid()} {uuid.uuid4().hex}"


def bind(call: Call | HostFunction, arrays: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Add a call to the program that is being traced.

    `shapes` are the shapes of the results; None stands for the shape of the array.
    """
    forms = tuple(
        jax.ShapeDtypeStruct(array.shape if shape is None else tuple(shape), array.dtype)
        for array, shape in zip(arrays, shapes, strict=True)
    )
    return list(collective.bind(*arrays, call=call, forms=forms))


def call_function(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], arrays: Sequence[Any]
) -> list[Any]:
    """Let the traced program call a function of torch tensors, which may use Horovod."""
    key = f"{_PROCESS} {next(_numbers)}"
    call = HostFunction(function, key)
    _functions[key.encode()] = call
    return bind(call, arrays, [None] * len(arrays))


@collective.def_effectful_abstract_eval
def _abstract(*arguments: Any, call: Any, forms: Any) -> tuple[list[Any], set[Any]]:
    results = [
        argument.update(shape=form.shape, dtype=form.dtype, weak_type=False)
        for argument, form in zip(arguments, forms, strict=True)
    ]
    return results, {_effect} if call.is_ordered else set()


def _lower(context: Any, *arguments: Any, call: Any, forms: Any, platform: str) -> Any:
    """Translate a call into the custom call of a compiled program."""
    _check_devices(context)
    if platform == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError(
            "JAX uses a GPU that the installed torch cannot: install a build of torch for CUDA, or "
            "call Horovod's collectives outside of jit"
        )
    _register(platform)
    if platform == "cpu":
        # With a host callback JAX runs the program in the calling thread, so that every rank gets
        # the errors at the call. Otherwise that depends on how much there is to compute.
        context.module_context.add_host_callback(_never_called)
    if isinstance(call, HostFunction):
        context.module_context.add_keepalive(call)
    # Results may take over the memory of arguments that the program does not need afterwards. The
    # token, if there is one, is the first argument and the first result.
    tokens = [abstract_token] if call.is_ordered else []
    target = jax.ffi.build_ffi_lowering_function(
        xla_ffi.TARGET,
        has_side_effect=True,
        operand_output_aliases={
            index + len(tokens): index + len(tokens)
            for index, (given, made) in enumerate(
                zip(context.avals_in, context.avals_out, strict=True)
            )
            if given.shape == made.shape and given.dtype == made.dtype
        },
    )
    given = [context.tokens_in.get(_effect)] if call.is_ordered else []
    results = target(
        context.replace(
            avals_in=[*tokens, *context.avals_in], avals_out=[*tokens, *context.avals_out]
        ),
        *given,
        *arguments,
        call=call.to_text(),
    ).results
    if not call.is_ordered:
        return results
    token, *results = results
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({_effect: token})))
    return results


def _never_called(*_: Any) -> Any:
    raise AssertionError("programs call us by `xla_ffi`")


def _check_devices(context: Any) -> None:
    """Refuse programs for several devices."""
    count = getattr(context.module_context.axis_context, "num_devices", 1) or 1
    mesh = getattr(context.module_context.axis_context, "mesh", None)
    count = max(count, getattr(mesh, "size", 1))
    if count > 1:
        raise ValueError(
            f"this program is compiled for {count} devices, and XLA runs each part of it in an "
            "order of its own, so Horovod's collectives cannot be ordered in it: start one rank "
            "per device, and call them outside of pmap and shard_map"
        )


def _refuse_platform(context: Any, *arguments: Any, call: Any, forms: Any) -> Any:
    """Refuse to compile for platforms other than CPUs and CUDA GPUs."""
    platforms = ", ".join(context.module_context.platforms)
    raise NotImplementedError(
        f"Horovod's collectives can be compiled for CPUs and CUDA GPUs, not for {platforms}: call "
        f"them outside of jit"
    )


mlir.register_lowering(collective, _refuse_platform)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        collective, functools.partial(_lower, platform=_platform), platform=_platform
    )


def _batch(arguments: Any, dimensions: Any, *, call: Any, forms: Any) -> Any:
    """Run one call on all elements of a vmap together."""
    if call.kind not in ("allreduce", "broadcast"):
        raise NotImplementedError(
            f"vmap has no meaning for {call.kind}: ranks exchange whole arrays. Call it outside "
            "of vmap"
        )
    return bind(call, arguments, [None] * len(arguments)), dimensions


batching.primitive_batchers[collective] = _batch


def _refuse_derivative(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("Horovod's collectives have gradients, but no forward derivatives")


ad.primitive_jvps[collective] = _refuse_derivative


# -- while a program runs --------------------------------------------------------------------


def _run(frame: xla_ffi.Frame) -> None:
    """Run a call of a compiled program, on the program's stream if it is on a GPU."""
    text, sources, targets = frame.text, frame.arguments, frame.results
    device = next((each.device for each in targets if not each.is_cpu), None)
    if device is None:
        _execute(text, sources, targets)
        return
    stream = torch.cuda.ExternalStream(frame.stream, device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        _execute(text, sources, targets)


def _execute(text: bytes, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Run the collective or the function that the text stands for."""
    if not text.startswith(b"function "):
        from_text(text).run_compiled(sources, targets)
        return
    call = _functions.get(text)
    if call is None:
        raise HorovodInternalError("this program calls a function of another process: compile anew")
    fill(targets, sources)
    for target, result in zip(targets, call.function(list(targets)), strict=True):
        if result is not target:
            target.copy_(result)


@functools.cache
def _register(platform: str) -> None:
    xla_ffi.register("CUDA" if platform == "cuda" else platform, _run)


# -- between programs ------------------------------------------------------------------------


def wait_for_programs(name: str | None) -> None:
    """Wait for running programs, before a collective outside a program.

    Programs run in the background. Without this wait, their collectives and this one could run in
    another order on other ranks.

    Args:
        name: The name of the collective.

    Raises:
        RuntimeError: The collective has no name and is called from a host callback of a program;
            callbacks have no order, so that the ranks could not match it.
    """
    if runtime_tokens.current_tokens:
        finish_programs()
    if name is None and _in_callback():
        raise RuntimeError(
            "a collective was called from a host callback of a compiled program (io_callback, "
            "pure_callback), which XLA runs in any order: call Horovod's function inside of the "
            "jitted function itself, or give the call a name"
        )


def _in_callback() -> bool:
    """Return whether a host callback of a compiled program is on the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__") == "jax._src.callback":
            return True
        frame = frame.f_back
    return False


def forget_programs() -> None:
    """Let the next program neither wait for the one before nor fail with its error."""
    runtime_tokens.clear()


def finish_programs() -> None:
    """Wait for programs that are still running.

    Errors of programs are ignored here; they are raised where the program's results are used. On
    some ranks the error may have come with the call of the program already, and all ranks must go
    on in the same way.
    """
    with contextlib.suppress(Exception):
        runtime_tokens.block_until_ready()
    forget_programs()


def _at_exit() -> None:
    if runtime.is_initialized():
        finish_programs()
    runtime_tokens.clear()


atexit.register(_at_exit)
