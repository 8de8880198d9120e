"""Reduces the gradients of Keras on JAX, whose compiled steps call the host to do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod._keras.reduction import HostReduction
from horovod.engine.arguments import has_no_peers
from horovod.engine.collective import WORLD
from horovod.engine.runtime import runtime
from horovod.jax.arrays import is_tracer, to_jax, to_torch
from horovod.jax.compiled.primitive import call_function, wait_for_programs


class JaxReduction(HostReduction):
    """Reduces JAX arrays, at once or as a part of the function that JAX is tracing."""

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        # If Horovod is not initialised, this raises an error before a step is compiled.
        runtime.group(WORLD)
        traced = any(is_tracer(gradient) for gradient in results)
        if has_no_peers(self._options.process_set) and not runtime.is_elastic():
            if not traced:
                runtime.statistics.end_step()
                return results
            if runtime.config.stats_interval is None:
                return results  # nobody asked for statistics, so the program need not call the host
        indices = [index for index, gradient in enumerate(results) if gradient is not None]
        given = [results[index] for index in indices]
        present = [variables[index] for index in indices]

        def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return self.reduce(tensors, present)

        if traced:
            reduced = call_function(on_host, given)
        else:
            wait_for_programs(self._name)
            tensors = on_host([to_torch(gradient).clone() for gradient in given])
            reduced = [to_jax(tensor, each) for tensor, each in zip(tensors, given, strict=True)]
        for index, gradient in zip(indices, reduced, strict=True):
            results[index] = gradient
        return results
