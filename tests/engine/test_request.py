"""Requests by themselves, without any processes."""

from __future__ import annotations

import pytest
import torch

from horovod.common.reduce_op import ReduceOp
from horovod.engine.request import Kind, signature_of


@pytest.mark.parametrize(
    "other",
    [
        {"name": "y"},
        {"tensors": [torch.zeros(4)]},
        {"tensors": [torch.zeros(3, dtype=torch.float64)]},
        {"tensors": [torch.zeros(3, 1)]},
        {"op": ReduceOp.MIN},
        {"prescale": 2.0},
        {"postscale": 0.5},
        {"detail": 1},
        {"kind": Kind.BROADCAST},
    ],
)
def test_a_signature_covers_all_that_must_agree(other):
    base = {"kind": Kind.ALLREDUCE, "name": "x", "tensors": [torch.zeros(3)]}
    assert signature_of(**base) != signature_of(**{**base, **other})  # type: ignore[arg-type]
    assert signature_of(**base) == signature_of(**base)  # type: ignore[arg-type]


def test_the_first_dimension_may_differ_where_ranks_gather():
    for kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        few, many = (signature_of(kind, "x", [torch.zeros(n, 2)]) for n in (1, 9))
        assert few == many
        assert few != signature_of(kind, "x", [torch.zeros(1, 3)])
