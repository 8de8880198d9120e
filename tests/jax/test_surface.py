"""The public surface: the names of horovod.torch that have a meaning here, and their arguments."""

from __future__ import annotations

import inspect

import pytest

import horovod.jax as hvd
import horovod.torch as hvd_torch
from horovod.common.optimizer_options import OptimizerOptions
from tests.bindings.options import not_in

# What changes a tensor in place, or is of torch alone.
MISSING = {
    "SyncBatchNorm",  # of flax: in horovod.jax.linen and horovod.jax.nnx
    "allreduce_",
    "allreduce_async_",
    "broadcast_",
    "broadcast_async_",
    "broadcast_optimizer_state",  # is a tree as well: broadcast_parameters
    "grouped_allreduce_",
    "grouped_allreduce_async_",
    "sparse_allreduce_async",
}
OWN = {"average_metrics", "grad", "is_homogeneous", "value_and_grad"}


def test_names():
    assert set(hvd.__all__) == set(hvd_torch.__all__) - MISSING | OWN
    assert all(hasattr(hvd, name) for name in [*hvd.__all__, "elastic", "linen", "nnx"])
    assert hvd.elastic.__all__ == ["JaxState", "run"]


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in set(hvd.__all__) & set(hvd_torch.__all__)
        if inspect.isfunction(getattr(hvd, name))
        and name not in ("DistributedOptimizer", "broadcast_parameters")
    ),
)
def test_arguments_are_those_of_torch(name: str):
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (hvd, hvd_torch))
    assert list(ours.parameters) == list(theirs.parameters)
    for argument, parameter in ours.parameters.items():
        if argument != "compression":
            assert parameter.default == theirs.parameters[argument].default


def test_the_record_of_options_has_all_arguments():
    assert not_in(OptimizerOptions, hvd.DistributedOptimizer) == {"optimizer"}
    for function in (hvd.grad, hvd.value_and_grad):
        assert not_in(OptimizerOptions, function) == {"fun", "argnums", "has_aux", "options"}
