"""Makes the collectives differentiable."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from horovod.jax.call import Call
from horovod.jax.compiled import dispatch

Run = Callable[[Call, list[Any]], list[Any]]  # runs a call on arrays, and returns its results


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _RowCounts:
    """The inputs' numbers of rows, which JAX keeps for the backward pass."""

    counts: tuple[int, ...]


def differentiable(run: Run, send_back: Callable[..., list[Any]]) -> Run:
    """Return a function like `run` whose results have gradients.

    Args:
        run: Runs a call, at once or as part of the program that is being traced. It may return more
            arrays than it gets; these have no gradients.
        send_back: Returns the gradients of inputs. It gets a call to carry them, the gradients of
            the results, the inputs' numbers of rows, and the additional results of `run`. All ranks
            must make the same calls, so it gets the gradients of all inputs whose type allows one,
            whether or not this rank needs them.

    Returns:
        The function. It uses `run` while JAX traces a program or differentiates; other calls run
        at once. For an empty list of arrays there is no call.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def recorded(call: Call, arrays: list[Any]) -> list[Any]:
        return run(call, arrays)

    def forward(call: Call, arrays: list[Any]) -> tuple[list[Any], Any]:
        results = recorded(call, arrays)  # not run(): gradients of gradients come back here
        rows = _RowCounts(tuple(array.shape[0] if array.ndim else 0 for array in arrays))
        return results, (rows, results[len(arrays) :])

    def backward(call: Call, residuals: Any, gradients: list[Any]) -> tuple[list[Any]]:
        rows, others = residuals
        results = list(gradients[: len(rows.counts)])
        indices = [i for i, each in enumerate(results) if each.dtype != jax.dtypes.float0]
        if indices:
            name = None if call.name is None else f"{call.name}.grad"
            back = dataclasses.replace(call, name=name, labels=(), size=None, ends_step=False)
            counts = [rows.counts[index] for index in indices]
            computed = send_back(back, [results[index] for index in indices], counts, *others)
            for index, result in zip(indices, computed, strict=True):
                results[index] = result
        return (results,)

    recorded.defvjp(forward, backward)

    def run_or_record(call: Call, arrays: list[Any]) -> list[Any]:
        if not arrays:
            return []
        if not dispatch.is_traced(arrays):
            return dispatch.run_now(call, arrays)
        return list(recorded(call, arrays))

    return run_or_record
