"""Reducing the gradients of a JAX step, which is compiled: the step calls the host for it.

JAX's own callbacks first put their arguments on a device, and so wait for a thread that may be the
one they run in. The primitive here gets the arguments as numpy arrays, and waits for nobody but the
other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from horovod._keras.arrays import to_numpy, to_torch
from horovod._keras.reduction import HostReduction, is_alone
from horovod.engine.job import WORLD
from horovod.engine.runtime import runtime

Arrays = Sequence[np.ndarray[Any, Any]]

_host_call: Any = Primitive("horovod_host_call")
_host_call.multiple_results = True


@_host_call.def_abstract_eval
def _forms(*arguments: Any, function: Callable[..., Arrays]) -> list[Any]:
    return list(arguments)  # the results are like the arguments


def _lower(context: Any, *arguments: Any, function: Callable[..., Arrays]) -> Any:
    results, _, _ = mlir.emit_python_callback(
        context,
        function,
        None,
        list(arguments),
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
        returns_token=False,
    )
    return results


mlir.register_lowering(_host_call, _lower)


class JaxReduction(HostReduction):
    """Reduces JAX arrays, at once or as part of a function that is being compiled."""

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        runtime.channel(WORLD)  # says if Horovod is not initialised, before a step is compiled
        if is_alone(self._terms.process_set) and not runtime.is_elastic():
            return results
        places = [place for place, gradient in enumerate(results) if gradient is not None]
        given = [results[place] for place in places]
        present = [variables[place] for place in places]

        def on_host(*arrays: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
            reduced = self.reduce([to_torch(array) for array in arrays], present)
            return tuple(
                to_numpy(tensor, like=array) for tensor, array in zip(reduced, arrays, strict=True)
            )

        if any(isinstance(gradient, jax.core.Tracer) for gradient in given):
            reduced = _host_call.bind(*given, function=on_host)
        else:
            reduced = [jnp.asarray(array) for array in on_host(*map(np.array, given))]
        for place, gradient in zip(places, reduced, strict=True):
            results[place] = gradient
        return results
