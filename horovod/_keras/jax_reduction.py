"""Reducing the gradients of Keras on JAX, whose steps are compiled and call the host for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod._keras.reduction import HostReduction, is_alone
from horovod.engine.job import WORLD
from horovod.engine.runtime import runtime
from horovod.jax.arrays import is_tracer, to_jax, to_torch
from horovod.jax.primitive import call_function, wait_for_programs


class JaxReduction(HostReduction):
    """Reduces JAX arrays, at once or as part of a function that is being compiled."""

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        runtime.group(WORLD)  # says if Horovod is not initialised, before a step is compiled
        traced = any(is_tracer(gradient) for gradient in results)
        if is_alone(self._terms.process_set) and not runtime.is_elastic():
            if not traced:
                runtime.statistics.end_step()
                return results
            if runtime.config.stats_interval is None:
                return results  # the program is faster without a call that tells of its steps
        places = [place for place, gradient in enumerate(results) if gradient is not None]
        given = [results[place] for place in places]
        present = [variables[place] for place in places]

        def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return self.reduce(tensors, present)

        if traced:
            reduced = call_function(on_host, given)
        else:
            wait_for_programs(self._name)
            tensors = on_host([to_torch(gradient).clone() for gradient in given])
            reduced = [to_jax(tensor, each) for tensor, each in zip(tensors, given, strict=True)]
        for place, gradient in zip(places, reduced, strict=True):
            results[place] = gradient
        return results
